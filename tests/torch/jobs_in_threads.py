"""Torch training functions on modelled servers, all in this process, and on one process as the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from bml.sim.programs.faults import Dead, Faults
from bml.sim.programs.running import run
from bml.train.batches import BatchPlan

N_SAMPLES, N_FEATURES, N_CLASSES = 90, 6, 3


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    """Features (90, 6) float32, and labels (90,) int64."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N_SAMPLES, N_FEATURES, generator=generator)
    return x, (x @ torch.randn(N_FEATURES, N_CLASSES, generator=generator)).argmax(dim=1)


def initialised(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """The same values on every server: torch's own random numbers are shared by the threads."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return model


@dataclass
class Job:
    """The ends of all servers, and `violations` of what the model of a job promises."""

    values: dict[int, Any] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    ledgers: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, BaseException] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)

    @property
    def value(self) -> Any:
        """The value of the lowest server; all must have ended well and with the same parameters."""
        assert not self.errors, self.errors
        assert not self.violations
        assert len(set(self.digests.values())) == 1
        assert len({each["digest"] for each in self.ledgers.values()}) == 1
        return self.values[min(self.values)]


def on_servers(train: Callable[[Any], Any], n_servers: int = 3, faults: Faults | None = None) -> Job:
    """Run a training function on so many servers."""
    job, faults = Job(), replace(faults or Faults(), holds_for_joiners=True)

    def note(communicator: Any, session: Any, value: Any, error: BaseException | None) -> None:
        if error is None:
            job.values[communicator.server] = value
            job.digests[communicator.server] = session.digest()
            job.ledgers[communicator.server] = session.samples()
        elif not isinstance(error, Dead):
            job.errors[communicator.server] = error

    group = run(train, range(n_servers), faults, note)
    job.violations = group.violations
    return job


def oracle(
    model: torch.nn.Module,
    optimizer: Any,
    loss: Callable[[Any, Any], Any],
    plan: BatchPlan,
    each_step: Callable[[], Any] = lambda: None,
    before_step: Callable[[], Any] = lambda: None,
) -> list[Any]:
    """Plain torch on one process over the same global batches; returns what `each_step` returned."""
    x, y = samples()
    found = []
    for batch in plan:
        rows = torch.from_numpy(batch.indices.copy())
        optimizer.zero_grad()
        (loss(model, (x[rows], y[rows])) / len(rows)).backward()
        before_step()
        optimizer.step()
        found.append(each_step())
    return found
