"""Training of a PyTorch model on a session, without torch.distributed: what `bml.torch.attach` is made of."""
