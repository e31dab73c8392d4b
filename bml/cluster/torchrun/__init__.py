"""`bml torchrun`: starts the ranks of a PyTorch job, and leaves the survivors of a dead rank alone."""
