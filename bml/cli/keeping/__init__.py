"""Commands for checkpoints."""
