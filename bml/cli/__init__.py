"""bml/cli."""
