"""bml/train."""
