"""The documentation, and the programs that write and check its pages."""
