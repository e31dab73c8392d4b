"""Accelerators as bml.torch sees them: marks in their work, and copies from and to pinned host memory."""
