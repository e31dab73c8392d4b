"""Training functions and a launcher for the tests with real processes."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

import bml
from bml.protocol.timeouts import Timeouts

TIMES = Timeouts.of()
SILENCE_S = TIMES.detect_s + TIMES.heartbeat_s + TIMES.silence_window_s + 2 * TIMES.answer_s
"""Until a view without a silent part is in force, at the defaults: who answers later is no member of it."""
DEATH_S = TIMES.proof_window_s + 2 * TIMES.answer_s
"""The same after a death, which is seen at once."""

N_SAMPLES, GLOBAL_BATCH, LENGTH = 180, 36, 301


class Seen:
    """What a job's coordinators said while it ran, as its `on_change`: faults show in it.

    `terms` are the coordinators' numbers, `failures` all that was ever broken in a view.
    """

    def __init__(self) -> None:
        self.terms: list[int] = []
        self.failures: set[str] = set()

    def __call__(self, snapshot: dict[str, Any]) -> None:
        if snapshot["term"] not in self.terms:
            self.terms.append(snapshot["term"])
        self.failures.update(snapshot["failures"])


def wait_for(condition: Callable[[], Any], within_s: float = 60.0) -> Any:
    deadline = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)
    return found


def launch(train: Any, fabric: str = "bcube:3x2", **settings: Any) -> bml.Result:
    """Plain processes: they start in a second. Over tcp if nothing else is asked for: links are tested."""
    return bml.launch(train, fabric=fabric, launcher="processes", **{"transport": "tcp", **settings})


def process_of(job: bml.Job, server: int) -> int:
    """The process of a server, once it answers: a status waits a second for it."""
    return int(wait_for(lambda: job.status()["servers"][server].get("process")))


def sample_rows(indices: Any, w: Any) -> Any:
    """One float row per sample, summed: what a gradient is to the runtime. It depends on `w`."""
    columns = np.arange(LENGTH, dtype=np.float32)
    rows = np.sin(indices[:, None] * np.float32(0.7) + columns) + w[None, :] * np.float32(0.01)
    return rows.sum(axis=0, dtype=np.float32)


def descend(
    session: Any,
    recompute: bool = True,
    epochs: int = 8,
    padding: int = 0,
    pause_s: float = 0.0,
    pause: Callable[[], None] = lambda: None,
    rate: float = 0.1,
) -> dict[str, Any]:
    """A smooth toy training whose parameters depend on every sample of every step.

    So many zeros beside the gradients make the steps long, and so does a pause in seconds, or a function that
    is called before each batch.
    """
    w = session.empty(LENGTH)
    w[:] = 0
    session.state(params=w)
    history: list[Any] = []
    shares: list[Any] = []
    zeros = np.zeros(padding, np.float32)

    def again(indices: Any) -> Any:
        return [sample_rows(indices, w), zeros]

    for batch in session.batches(N_SAMPLES, global_batch=GLOBAL_BATCH, epochs=epochs, seed=3):
        time.sleep(pause_s)
        pause()
        shares.append(batch.indices)
        g = again(batch.indices)
        w -= np.float32(rate) * batch.allreduce(g, recompute=again if recompute else None)[0]
        history.append((len(history) + 1, session.contributors, hashlib.sha256(w.tobytes()).hexdigest()))
    return {"params": w, "history": history, "shares": shares}


def pace(session: Any, n_servers: int, pause_s: float = 0.25) -> None:
    """Take longer for a step until so many servers contribute, so that those that join find the job running.

    A joiner itself does not pause in steps that it is only told of: it would never catch up.
    """
    if len(session.contributors) < n_servers and not session.replays:
        time.sleep(pause_s)


def reference(epochs: int = 8, instead: Mapping[int, Any] = MappingProxyType({})) -> Any:
    """`descend` on one process: the numeric oracle.

    `instead` has the samples of batches, counted from 1, of which some were left out.
    """
    from bml.train.batches import BatchPlan

    w = np.zeros(LENGTH, np.float32)
    for number, batch in enumerate(BatchPlan(N_SAMPLES, GLOBAL_BATCH, epochs, 3), 1):
        indices = instead.get(number, batch.indices)
        w -= np.float32(0.1) * (sample_rows(indices, w) / np.float32(len(indices)))
    return w


def children() -> set[int]:
    """Processes of this one, zombies too."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has ended meanwhile
            found.update(map(int, (task / "children").read_text().split()))
    return found
