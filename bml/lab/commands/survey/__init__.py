"""`bml plan --survey`: the command, its tables and its picture."""
