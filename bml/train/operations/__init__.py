"""What the collectives bring to their steps, and what they give to the training function."""
