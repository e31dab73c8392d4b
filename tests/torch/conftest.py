"""PyTorch computes with one thread in the tests' own process: oracles are small, others need the cores."""

from __future__ import annotations

import contextlib

with contextlib.suppress(ImportError):  # without it the tests are skipped
    import torch

    torch.set_num_threads(1)
