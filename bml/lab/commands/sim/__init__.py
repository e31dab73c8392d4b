"""`bml sim`: the command, its answer, comparisons, pictures."""
