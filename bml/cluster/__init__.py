"""bml/cluster."""
