"""What `balance=True` makes of a step if one of the servers computes at half the speed of the others.

    python benchmarks/balance.py --fabric bcube:3x2 --turns 3

Computation is a sleep for each sample, so that all servers compute at once on however few processors.
Measured in turn are steps with equal speeds and with one slow server, each with equal shares and with
balance, from commit to commit, exchanges of times included. In the ideal split all servers compute equally
long; no step can be shorter.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import click
import numpy as np

import bml

PER_SERVER = 12
"""Samples of an equal share."""
ADAPTS = 12
"""Steps before those that are measured: the weights change after eight."""


def training(slow: int, factor: float, per_sample_s: float, turns: int, steps: int) -> Any:
    """A training function that returns the mean time of a step, in seconds, by case, one for each turn."""

    def train(session: bml.Session) -> dict[str, list[float]]:
        w, gradient = session.empty(1 << 16), session.empty(1 << 16)
        w[:], gradient[:] = 0, 1
        session.state(params=w)
        found: dict[str, list[float]] = {}
        n = PER_SERVER * len(session.contributors)
        for _ in range(turns):
            for case, (is_slow, balance) in CASES.items():
                # Loops with other numbers of samples have weights of their own.
                n_samples = n * (ADAPTS + steps + is_slow)
                times = factor if is_slow and session.server == slow else 1.0
                ends_s = []
                for batch in session.batches(n_samples, global_batch=n, epochs=1, balance=balance):
                    time.sleep(len(batch.indices) * per_sample_s * times)
                    w -= batch.allreduce(gradient)
                    ends_s.append(time.perf_counter())
                found.setdefault(case, []).append((ends_s[-1] - ends_s[ADAPTS - 1]) / (len(ends_s) - ADAPTS))
        return found

    return train


CASES = {
    "equal speeds, equal shares": (False, False),
    "equal speeds, balance": (False, True),
    "one slow, equal shares": (True, False),
    "one slow, balance": (True, True),
}
"""Whether a server is slow, and whether the loop balances."""


@click.command()
@click.option("--fabric", default="bcube:3x2", show_default=True)
@click.option("--factor", default=2.0, show_default=True, help="How much longer the slow server takes.")
@click.option("--per-sample-ms", default=10.0, show_default=True)
@click.option("--turns", default=3, show_default=True)
@click.option("--steps", default=24, show_default=True, help="Measured in each turn and case.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def main(fabric: str, factor: float, per_sample_ms: float, turns: int, steps: int, as_json: bool) -> None:
    """Measure steps with a slow server, with equal shares and with balance."""
    train = training(1, factor, per_sample_ms / 1000, turns, steps)
    result = bml.launch(train, fabric, launcher="processes", on_change=lambda now: None)
    n_servers = len(result.values)
    equal_s = PER_SERVER * per_sample_ms / 1000
    ideal_s = equal_s * n_servers / (n_servers - 1 + 1 / factor)
    rows = {
        case: statistics.median(
            np.mean([value[case][turn] for value in result.values.values()]) for turn in range(turns)
        )
        for case in CASES
    }
    if as_json:
        click.echo(json.dumps({"ideal_s": ideal_s, "computation_s": equal_s, "steps_s": rows}))
        return
    click.echo(f"computation {equal_s * 1e3:.0f} ms, ideal split {ideal_s * 1e3:.1f} ms")
    for case, step_s in rows.items():
        least_s = ideal_s if CASES[case][0] else equal_s
        click.echo(f"{case:28} {step_s * 1e3:7.1f} ms  {step_s / least_s:.2f} × the ideal split")


if __name__ == "__main__":
    main()
