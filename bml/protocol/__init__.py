"""bml/protocol."""
