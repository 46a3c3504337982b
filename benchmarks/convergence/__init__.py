"""How many steps, and how many seconds, optimizers need to the same loss."""
