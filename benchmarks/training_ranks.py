"""Ranks that take training steps when they are told to: with DistributedDataParallel, or attached to bml.

    python benchmarks/training_ranks.py BACKEND VIEWS PATH RANK RANKS MEETING-FILE

The gradients of the model are given, and little is computed, so a step is as long as its communication.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import bml.torch
from bml.lab.bench.host import Orders
from bml.lab.bench.ranks import Vector, contribution, timed, total
from bml.train.session import Session

N_LAYERS = 16
N_STEPS = 100_000


class Given(torch.nn.Module):
    """Its loss is the product of weights and given gradients: backward makes these, as new tensors."""

    def __init__(self, gradient: torch.Tensor):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.zeros_like(each) for each in layers(gradient))

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        pairs = zip(self.weights, gradients, strict=True)
        return torch.stack([torch.dot(weight, gradient) for weight, gradient in pairs]).sum()

    def gradient(self) -> Vector:
        return np.concatenate([each.grad.detach().numpy() for each in self.weights])


def layers(vector: torch.Tensor) -> list[torch.Tensor]:
    return list(vector.tensor_split(N_LAYERS))


class Ddp:
    """Steps of a model under DDP, which gives the mean over the ranks."""

    def __init__(self, views: bool):
        self._views = views
        self._size = 0

    def prepare(self, data: Vector) -> None:
        self._gradients = layers(torch.from_numpy(data))
        if data.size != self._size:
            self._size = data.size
            self.model = Given(torch.from_numpy(data))
            self._ddp = torch.nn.parallel.DistributedDataParallel(
                self.model, gradient_as_bucket_view=self._views
            )

    def step(self) -> None:
        self._ddp.zero_grad()
        self._ddp(self._gradients).backward()


class Attached:
    """Steps of a model that is attached; every server has one sample of a batch. One size a session."""

    def __init__(self, session: Session):
        self._session = session
        self._batches: Iterator[Any] = iter(())
        self.model: Any = None

    def prepare(self, data: Vector) -> None:
        self._gradients = layers(torch.from_numpy(data))
        if self.model is None:
            self.model = Given(torch.from_numpy(data))
            optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
            self._run = bml.torch.attach(self._session, self.model, optimizer)
            n = len(self._session.contributors)
            self._batches = self._run.batches(torch.zeros(n, 1), global_batch=n, epochs=N_STEPS)

    def step(self) -> None:
        next(self._batches)
        self.model(self._gradients).backward()
        self._run.reduce()


def serve(path: str, rank: int, steps: Any) -> None:
    """Carry out the orders of the host: "check" counts wrong elements of a mean, "time" times steps."""
    orders = Orders(path, rank)
    while order := orders.next():
        count = order.get("count", 0)
        if order["do"] == "failures":
            orders.answer(failures=[])
        elif order["do"] == "check":
            steps.prepare(contribution(rank, count))
            steps.step()
            found = np.rint(steps.model.gradient() * len(order["of"]))
            orders.answer(wrong=int(np.count_nonzero(found != total(order["of"], count))))
        else:
            steps.prepare(np.ones(count, np.float32))
            orders.answer(**timed(steps.step, order["times"])._asdict())


def serve_attached(path: str, session: Session) -> None:
    """The training function of a job, with the path of the host before."""
    torch.set_num_threads(1)
    serve(path, session.server, Attached(session))


def main() -> None:
    backend, views, path, rank, n_ranks, meeting = sys.argv[1:]
    torch.set_num_threads(1)
    store = dist.FileStore(meeting, int(n_ranks))
    minute = datetime.timedelta(seconds=60)
    dist.init_process_group(backend, store=store, rank=int(rank), world_size=int(n_ranks), timeout=minute)
    serve(path, int(rank), Ddp(views == "views"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
