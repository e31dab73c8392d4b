"""`bml figures`: the command, its pictures, its files and its table."""
