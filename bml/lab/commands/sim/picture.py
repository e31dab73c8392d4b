"""`bml sim --plot`: how much all NICs send over time, and how busy each link is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bml.cli.printed import without
from bml.lab.bench import plot
from bml.lab.bench.rows import size_text
from bml.lab.commands.sim.asked import Report
from bml.lab.commands.sim.options import nics
from bml.lab.flows.simulate import Outcome

_BINS = 200


def check_drawable(target: Path) -> None:
    """Raise UsageError if nothing can be drawn into this file."""
    plot.check(target)


def draw(report: Report, outcome: Outcome, target: Path) -> str:
    """Draw into an image file; return what there is to say of it."""
    pyplot = plot.pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    times, rate = throughput(outcome)
    left.fill_between(
        times * 1e3, rate * 8 * outcome.stands_for / 1e9, step="post", color="#2f6fb0", alpha=0.7
    )
    left.set(xlabel="time (ms)", ylabel="sent by all servers (Gbit/s)", ylim=(0, None))
    busy = np.sort(outcome.utilisation)[::-1]
    right.plot(np.arange(1, len(busy) + 1), busy * 100, color="#c77f1a", drawstyle="steps-mid")
    right.set(xlabel="links, the busiest first", ylabel="busy (%)", ylim=(0, 105))
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.suptitle(title(report))
    figure.savefig(target, dpi=120)
    pyplot.close(figure)
    return f"drawn into {target}"


def title(report: Report) -> str:
    """Say what was simulated, and what it took."""
    fabric = without(report.fabric, report.failures)
    step = f"{size_text(report.nbytes)} over {nics(report.rate_bit)}"
    return f"{report.algorithm} on {fabric}\n{step}: {report.gst_s * 1e3:.3f} ms"


def throughput(outcome: Outcome) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the edges of equal spans of time, and bytes per second sent in each: float64 [201] twice.

    A transfer is taken to be sent evenly between its begin and its end.
    """
    edges = np.linspace(0, max(outcome.seconds, 1e-12), _BINS + 1)
    sends = (outcome.network.connection >= 0) & (outcome.sent > outcome.began)
    began, sent, nbytes = outcome.began[sends], outcome.sent[sends], outcome.nbytes[sends]
    rate = nbytes / (sent - began)
    # Bytes sent before a time: each transfer begins to add its rate at `began` and ends at `sent`.
    when = np.concatenate([began, sent])
    order = np.argsort(when, kind="stable")
    slope = np.cumsum(np.concatenate([rate, -rate])[order])
    total = np.concatenate([[0.0], np.cumsum(slope[:-1] * np.diff(when[order]))])
    before = np.interp(edges, when[order], total, left=0.0)
    each = np.diff(before) / np.diff(edges)
    return edges, np.concatenate([each, each[-1:]])
