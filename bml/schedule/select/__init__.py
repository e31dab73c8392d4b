"""Choosing an algorithm: those that there are, the cost model, plans and their comparison."""
