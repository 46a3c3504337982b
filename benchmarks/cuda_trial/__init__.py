"""One script that proves the family on a GPU and measures it there."""
