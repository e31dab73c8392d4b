"""bml/transport."""
