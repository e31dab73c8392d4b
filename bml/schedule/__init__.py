"""bml/schedule."""
