"""A PyTorch model trained in step on every server of the fabric: handwritten digits, SGD with momentum.

pip install 'bml[torch]' scikit-learn
bml run examples/train_torch.py --fabric bcube:2x2 --launcher processes --fault kill:1@step=20
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import bml.torch

TEST_SAMPLES = 357
GLOBAL_BATCH = 288
EPOCHS = 14


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """Images (1797, 64) float32, and labels (1797,) int64, in the same order on every server."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(1797).permutation(len(labels))
    return torch.tensor(images[order] / 8 - 0.6, dtype=torch.float32), torch.tensor(labels[order])


def summed_loss(model: nn.Module, samples: Any) -> torch.Tensor:
    """The cross-entropy, SUMMED over the samples."""
    images, labels = samples
    return functional.cross_entropy(model(images), labels, reduction="sum")


def train(session: Any) -> dict[str, float]:
    """Runs on every server of the fabric; `session` is a bml.Session."""
    images, labels = load()
    torch.manual_seed(0)  # the same model on every server
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)

    run = bml.torch.attach(session, model, optimizer, loss=summed_loss)
    samples = images[TEST_SAMPLES:], labels[TEST_SAMPLES:]
    for batch in run.batches(samples, global_batch=GLOBAL_BATCH, epochs=EPOCHS, seed=0):
        summed_loss(model, batch).backward()
        optimizer.step()

    with torch.no_grad():
        right = model(images[:TEST_SAMPLES]).argmax(dim=1) == labels[:TEST_SAMPLES]
    return {"accuracy": float(right.float().mean())}
