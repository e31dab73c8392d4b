"""How long servers that train a PyTorch model take to start, and a server that joins them.

    python benchmarks/torch_start.py --trials 3

Nine servers, as processes of this machine, train a small model with `bml.torch.attach`. Measured are the
time from `bml.start` to the first committed step, and, when server 4 has been killed and is started again,
the time from the request to its first step.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import click
import torch

import bml
import bml.torch

FABRIC, SAMPLES, BATCH, EPOCHS, PAUSE_S = "bcube:3x2", 720, 72, 60, 0.03
DEADLINE_S = 120.0


def summed_loss(model: torch.nn.Module, samples: Any) -> torch.Tensor:
    inputs, targets = samples
    return (model(inputs) - targets).square().sum()


def train(session: Any) -> int:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    run = bml.torch.attach(session, model, optimizer, loss=summed_loss)
    samples = torch.ones(SAMPLES, 64), torch.ones(SAMPLES, 1)
    for batch in run.batches(samples, global_batch=BATCH, epochs=EPOCHS, seed=0):
        time.sleep(PAUSE_S)  # so that the joiner comes while the job runs
        summed_loss(model, batch).backward()
        optimizer.step()
    return torch.get_num_threads()


def members(job: bml.Job, n: int) -> None:
    """Wait until the job has so many members."""
    deadline = time.monotonic() + DEADLINE_S
    while len(job.status()["members"]) != n:
        if time.monotonic() > deadline:
            raise SystemExit(f"the job never had {n} members")
        time.sleep(0.02)


def trial() -> tuple[float, float]:
    """Seconds to the first step, and seconds of the joiner to its first step."""
    began = time.monotonic()
    with bml.start(train, FABRIC, launcher="processes", start_s=DEADLINE_S, on_change=lambda _: None) as job:
        members(job, 9)
        job.inject("kill:4")
        members(job, 8)
        asked = time.monotonic()
        job.inject("join:4")
        metrics = job.wait().report["metrics"]
    return metrics[0]["commit_at_s"][0] - began, metrics[4]["commit_at_s"][0] - asked


@click.command()
@click.option("--trials", default=3, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def main(trials: int, as_json: bool) -> None:
    """Measure the start of servers that use PyTorch."""
    found = [trial() for _ in range(trials)]
    first, joiner = ([round(value, 2) for value in column] for column in zip(*found, strict=True))
    if as_json:
        click.echo(json.dumps({"first_step_s": first, "joiner_s": joiner}))
        return
    for name, values in (("first step", first), ("joiner", joiner)):
        click.echo(f"{name}: median {statistics.median(values)} s of {values}")


if __name__ == "__main__":
    main()
