"""Checkpoints of bml in the format of torch.distributed.checkpoint, and back."""
