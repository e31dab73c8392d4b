"""Forests of trees, the programs that they compile to, their cost, and the check of both."""
