"""How much a server that joins disturbs the others while the training state moves to it.

    python benchmarks/joining.py --trials 5

Nine servers, as processes, sum a vector in step after step; server 4 is killed and started again. Compared
are the steps of a survivor in which the state moves, from the view that lets the joiner in to the one in
which it contributes, with those in which all nine contribute and nothing else goes on: medians over all
trials.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import click
import numpy as np

import bml

FABRIC, STEPS, PAUSE_S = "bcube:3x2", 300, 0.02


def training(vector_nbytes: int, state_nbytes: int) -> Any:
    def train(session: bml.Session) -> None:
        params = session.empty(state_nbytes // 4)
        params[:] = 0
        session.state(params=params)
        gradient = session.empty(vector_nbytes // 4)
        gradient[:] = 1
        for _ in session.steps(STEPS):
            time.sleep(PAUSE_S)  # stands for computing a gradient
            params[: gradient.size] += session.allreduce(gradient)[: params.size]

    return train


def trial(vector_nbytes: int, state_nbytes: int) -> tuple[list[float], list[float], dict[str, Any]]:
    train = training(vector_nbytes, state_nbytes)
    faults = ["kill:4@step=60", "join:4@step=90"]
    result = bml.launch(train, FABRIC, launcher="processes", transport="tcp", faults=faults)
    views = result.report["views"]
    joins, ready = (next(v for v in views if word in v["reason"]) for word in ("joins", "caught up"))
    gaps = np.diff(result.report["metrics"][0]["commit_at_s"])  # gaps[i]: step i + 2
    whole = [*gaps[10:55], *gaps[ready["commit"] + 5 :]]
    # The view change itself is no transfer: the step in which it falls is left out on both sides.
    moving = list(gaps[joins["commit"] : max(joins["commit"] + 1, ready["commit"] - 1)])
    return whole, moving, {"change_s": joins["recover_s"], "steps_followed": len(moving)}


@click.command()
@click.option("--trials", default=5, show_default=True)
@click.option("--vector-mib", default=1, show_default=True)
@click.option("--state-mib", default=64, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def main(trials: int, vector_mib: int, state_mib: int, as_json: bool) -> None:
    """Compare steps with and without a joiner."""
    whole: list[float] = []
    moving: list[float] = []
    seen = []
    for _ in range(trials):
        a, b, how = trial(vector_mib << 20, state_mib << 20)
        whole += a
        moving += b
        seen.append(how)
    said = {
        "step_s": statistics.median(whole),
        "step_while_state_moves_s": statistics.median(moving),
        "ratio": statistics.median(moving) / statistics.median(whole),
        "trials": seen,
    }
    click.echo(json.dumps(said, indent=None if as_json else 1))


if __name__ == "__main__":
    main()
