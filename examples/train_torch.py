"""A PyTorch model trained in step on every server of the fabric: handwritten digits, SGD with momentum.

pip install 'bml[torch]' scikit-learn
bml run examples/train_torch.py --fabric bcube:2x2 --launcher processes --fault kill:1@step=20
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

TEST_SAMPLES = 357
GLOBAL_BATCH = 288
EPOCHS = 14

Indices = npt.NDArray[np.int64]


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """Images (1797, 64) float32, and labels (1797,) int64, in the same order on every server."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(1797).permutation(len(labels))
    return torch.tensor(images[order] / 8 - 0.6, dtype=torch.float32), torch.tensor(labels[order])


def model_of_a_seed() -> nn.Module:
    """The same on every server, so that nothing need be broadcast."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10))


def train(session: Any) -> dict[str, float]:
    """Runs on every server of the fabric; `session` is a bml.Session."""
    images, labels = load()
    model = model_of_a_seed()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.2, momentum=0.9)
    for parameter in parameters:  # made here, as a server that joins gets the others' values in these arrays
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    session.state(
        params=[parameter.detach().numpy() for parameter in parameters],
        momentum=[optimizer.state[parameter]["momentum_buffer"].numpy() for parameter in parameters],
    )
    # Gradients that lie one after the other, in memory that is sent as it is.
    gradients = session.bucket([tuple(parameter.shape) for parameter in parameters])

    def loss(indices: Indices) -> torch.Tensor:
        """The cross-entropy, SUMMED over training samples."""
        chosen = torch.tensor(indices) + TEST_SAMPLES
        return functional.cross_entropy(model(images[chosen]), labels[chosen], reduction="sum")

    def again(indices: Indices) -> list[npt.NDArray[np.float32]]:
        """The gradient over samples of a server that was lost; the bucket must stay as it is meanwhile."""
        return [gradient.numpy() for gradient in torch.autograd.grad(loss(indices), parameters)]

    for batch in session.batches(
        len(labels) - TEST_SAMPLES, global_batch=GLOBAL_BATCH, epochs=EPOCHS, seed=0
    ):
        gradients.vector[:] = 0
        point_to(parameters, gradients)
        loss(batch.indices).backward()  # which adds to the gradients that are there
        point_to(parameters, batch.allreduce(gradients, recompute=again))
        optimizer.step()

    with torch.no_grad():
        right = model(images[:TEST_SAMPLES]).argmax(dim=1) == labels[:TEST_SAMPLES]
    return {"accuracy": float(right.float().mean())}


def point_to(parameters: list[nn.Parameter], arrays: Any) -> None:
    """Let the gradients of the parameters be these arrays."""
    for parameter, array in zip(parameters, arrays, strict=True):
        parameter.grad = torch.from_numpy(array)
