"""A script as users of torch.distributed have them, with all that belongs to it; ranks may kill themselves.

DEATHS is a list such as `3:backward:0,0:snapshot:1`: a rank, a point of the script, and an epoch.
"""

import hashlib
import multiprocessing
import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import bml.torch

EPOCHS, N_SAMPLES, N_FEATURES, BATCH = 3, 960, 20, 16
SNAPSHOT = "snapshot.pt"


def reach(point: str, epoch: int) -> None:
    """Die here, if it was said so."""
    if f"{os.environ['RANK']}:{point}:{epoch}" in os.environ["DEATHS"].split(","):
        os.kill(os.getpid(), signal.SIGKILL)


class Points(Dataset):  # type: ignore[type-arg]
    """Labelled points; each is made when it is asked for, in a worker of the loader."""

    def __init__(self, first: int, n: int):
        self._first, self._n = first, n

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        x = torch.randn(N_FEATURES, generator=torch.Generator().manual_seed(self._first + index))
        return x, int(x[: N_FEATURES // 2].sum() > x[N_FEATURES // 2 :].sum())


class Trainer:
    """The training of one rank."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(N_FEATURES, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2)]
        self.epoch = 0
        self.ddp = DistributedDataParallel(nn.Sequential(*layers))
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=0.01)
        self.losses: list[float] = []
        next(iter(self.ddp.parameters())).register_hook(self._in_backward)

    def _in_backward(self, gradient: torch.Tensor) -> None:
        if len(self.losses) % 10 == 4:
            reach("backward", self.epoch)

    def train(self, loader: "DataLoader[tuple[torch.Tensor, torch.Tensor]]") -> None:
        self.ddp.train()
        for number, (x, y) in enumerate(loader):
            if number == 7:
                reach("batch", self.epoch)
                self._lose_a_worker()
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.ddp(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(self.ddp.parameters(), 5.0)
            self.optimizer.step()
            self.losses.append(loss.item())

    def _lose_a_worker(self) -> None:
        if f"{os.environ['RANK']}:worker:{self.epoch}" in os.environ["DEATHS"].split(","):
            for worker in multiprocessing.active_children():
                worker.kill()

    def evaluate(self, loader: "DataLoader[tuple[torch.Tensor, torch.Tensor]]") -> float:
        """The part of the samples of all ranks that is right."""
        self.ddp.eval()
        counts = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad():
            for x, y in loader:
                reach("evaluation", self.epoch)
                counts += torch.tensor([(self.ddp.module(x).argmax(1) == y).sum(), len(y)])
        dist.all_reduce(counts)
        return float(counts[0] / counts[1])

    def save(self) -> None:
        """One rank writes, whichever is left."""
        dist.barrier()
        if bml.torch.is_writer():
            torch.save({"epoch": self.epoch, "model": self.ddp.module.state_dict()}, "new.pt")
            reach("snapshot", self.epoch)
            os.replace("new.pt", SNAPSHOT)

    @property
    def digest(self) -> str:
        values = nn.utils.parameters_to_vector(self.ddp.parameters()).detach()
        return hashlib.sha256(values.numpy()).hexdigest()[:16]


def main() -> None:
    dist.init_process_group("bml")
    rank = dist.get_rank()
    data = Points(0, N_SAMPLES)
    sampler: DistributedSampler[tuple[torch.Tensor, int]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler, num_workers=2)
    held_out = Points(10_000, N_SAMPLES // 4)
    tests = DataLoader(
        held_out, batch_size=BATCH, sampler=DistributedSampler(held_out, shuffle=False), num_workers=1
    )
    trainer = Trainer()
    accuracy = 0.0
    for epoch in range(EPOCHS):
        trainer.epoch = epoch
        sampler.set_epoch(epoch)
        trainer.train(loader)
        accuracy = trainer.evaluate(tests)
        trainer.save()
    reach("last barrier", EPOCHS)
    dist.barrier()
    part = len(trainer.losses) // 4
    first, last = (sum(losses) / part for losses in (trainer.losses[:part], trainer.losses[-part:]))
    print("END", rank, trainer.digest, len(trainer.losses), first, last, accuracy, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
