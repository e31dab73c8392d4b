"""Checkpoints: the training state at a boundary, written in parts by all servers, and read by a later job."""
