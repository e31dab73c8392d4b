"""bml/sim."""
