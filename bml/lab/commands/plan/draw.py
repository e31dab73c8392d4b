"""`bml plan --draw`: draws trees of one root on a BCube or torus, before and after the failures.

The first two digits of a server's address are its place. Lines are hops of the reduce phase; a thicker line
is nearer to the root. Detours are red, their relays are marked, and dead servers and NICs are crossed out.
"""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from bml.schedule import Phase, Plan, plan
from bml.topology import BCube, Fabric, LinkFailure, SwitchFailure, Torus, UsageError

_INK, _GREY, _RED = "#1f2933", "#c5ced6", "#d64545"
_LEVELS = ("#2f6fb0", "#2a9d6f", "#8d5fb8", "#c77f1a", "#3aa6b9", "#b8557f")
_RADIUS = 0.19
MAX_SERVERS = 64
THREADS = 2
"""How many trees of one root are drawn, one below the other."""


def draw(fabric: Fabric, algorithm: str, target: Path) -> str:
    """Draw into an .svg, .png or .pdf file; return a sentence about the drawing.

    Raises:
        UsageError: matplotlib is missing, or the fabric or the file name cannot be drawn.
    """
    if not isinstance(fabric.wiring, BCube | Torus) or fabric.n_servers > MAX_SERVERS:
        raise UsageError(
            f"{fabric.name} cannot be drawn: only BCube and torus of up to {MAX_SERVERS} servers can be"
        )
    if target.suffix not in (".svg", ".png", ".pdf"):
        raise UsageError(f"'{target}' is not the name of a picture: give an .svg, .png or .pdf file")
    try:
        importlib.import_module("matplotlib").use("Agg")
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        raise UsageError("drawing needs matplotlib: pip install 'bml[plot]'") from None
    shown = [plan(fabric, algorithm)]
    if fabric.failures:
        shown.insert(0, plan(Fabric(fabric.wiring, rates=fabric.rates), "bml"))
    root, threads = _choose(shown)
    figure, axes = pyplot.subplots(
        threads, len(shown), figsize=(5.2 * len(shown), 4.7 * threads), squeeze=False
    )
    for thread, row in enumerate(axes):
        for axis, made in zip(row, shown, strict=True):
            _Panel(axis, made, _pieces(made, root)[thread]).draw(thread)
    _legend(figure, shown[-1], root)
    # Nothing in the file depends on when or where it was made.
    pyplot.rcParams["svg.hashsalt"] = "bml"
    figure.savefig(target, dpi=130, metadata={"Date": None} if target.suffix == ".svg" else None)
    pyplot.close(figure)
    return f"{threads * len(shown)} trees with root {root} in {target}"


def _plural(detours: int) -> str:
    return "" if not detours else ", 1 detour" if detours == 1 else f", {detours} detours"


def _pieces(made: Plan, root: int) -> list[int]:
    """Return the pieces of a root, in order."""
    return [int(piece) for piece in np.flatnonzero(made.forest.root == root)]


def _choose(shown: list[Plan]) -> tuple[int, int]:
    """Choose the root whose first trees have most detours, and how many of its trees to draw."""
    forest = shown[-1].forest
    detours = Counter(piece for piece, _ in forest.detours)
    roots = sorted(set(forest.root.tolist()))
    best = max(roots, key=lambda root: (sum(detours[p] for p in _pieces(shown[-1], root)[:THREADS]), -root))
    return best, min([THREADS, *(len(_pieces(made, best)) for made in shown)])


class _Panel:
    """One tree on one fabric."""

    def __init__(self, axis: Any, made: Plan, piece: int):
        self._axis = axis
        self._made = made
        self._fabric = made.fabric
        self._forest = made.forest
        self._piece = piece
        wiring = made.fabric.wiring
        assert isinstance(wiring, BCube | Torus)
        self._size = wiring.ports if isinstance(wiring, BCube) else wiring.size
        self._per_dimension = 1 if isinstance(wiring, BCube) else wiring.colours

    def draw(self, thread: int) -> None:
        """Draw the hops, then the servers on top of them."""
        relays = self._draw_hops()
        for server in range(self._fabric.n_servers):
            self._draw_server(server, relays.get(server, 0))
        self._draw_dead_nics()
        detours = sum(1 for piece, _ in self._forest.detours if piece == self._piece)
        name = str(self._fabric) if self._fabric.failures else f"{self._fabric.name}, healthy"
        what = f"{self._made.algorithm}, tree {thread + 1}" + _plural(detours)
        self._axis.set_title(f"{name}\n{what}", fontsize=11, color=_INK)
        self._axis.set_aspect("equal")
        self._axis.axis("off")
        self._axis.margins(0.07)

    def _at(self, server: int) -> tuple[float, float]:
        """Return a server's place: the first digit goes right, the second down, others move whole blocks."""
        digits = self._fabric.address(server)
        block = self._size + 0.6
        x = sum(digit * block ** (i // 2) for i, digit in enumerate(digits) if i % 2 == 0)
        y = sum(digit * block ** (i // 2) for i, digit in enumerate(digits) if i % 2 == 1)
        return float(x), -float(y)

    def _draw_hops(self) -> dict[int, int]:
        """Draw all edges of the tree; return how many detours each relay carries."""
        relays: Counter[int] = Counter()
        last = self._forest.n_stages(Phase.REDUCE) - 1
        for server in self._fabric.servers:
            path = self._forest.path(self._piece, server)
            stage = int(self._forest.stage[self._piece, server])
            relays.update(hop[0] for hop in path[1:])
            for sender, level, receiver in path:
                self._arrow(sender, level, receiver, stage / max(1, last), relayed=len(path) > 1)
        return dict(relays)

    def _arrow(self, sender: int, level: int, receiver: int, late: float, *, relayed: bool) -> None:
        (x0, y0), (x1, y1) = self._at(sender), self._at(receiver)
        length = float(np.hypot(x1 - x0, y1 - y0))
        # Longer hops of one row swing out further, so that they do not lie on the shorter ones.
        bend = 0.0 if length < 1.5 and not relayed else 0.2 + 0.04 * length
        shrink = 12 if length > 0 else 0
        self._axis.annotate(
            "",
            (x1, y1),
            (x0, y0),
            arrowprops={
                "arrowstyle": "-|>,head_width=0.28,head_length=0.5",
                "connectionstyle": f"arc3,rad={bend}",
                "color": _RED if relayed else _LEVELS[level // self._per_dimension % len(_LEVELS)],
                "linestyle": (0, (4, 2)) if relayed else "solid",
                "linewidth": 1.5 + 1.1 * late,
                "shrinkA": shrink,
                "shrinkB": shrink,
            },
        )

    def _draw_server(self, server: int, relayed: int) -> None:
        x, y = self._at(server)
        alive = self._fabric.server_alive(server)
        is_root = server == int(self._forest.root[self._piece])
        face = _INK if is_root else "white" if alive else "#f3d6d6"
        edge = _RED if relayed or not alive else _INK if alive else _GREY
        patches = importlib.import_module("matplotlib.patches")
        self._axis.add_patch(
            patches.Circle(
                (x, y), _RADIUS, facecolor=face, edgecolor=edge, linewidth=2.4 if relayed else 1.3, zorder=4
            )
        )
        self._axis.text(
            x,
            y,
            str(server),
            ha="center",
            va="center",
            fontsize=10,
            zorder=7,
            color="white" if is_root else _INK,
        )
        if not alive:
            for slope in (1, -1):
                self._axis.plot(
                    [x - 0.24, x + 0.24], [y - 0.24 * slope, y + 0.24 * slope], color=_RED, lw=2.2, zorder=6
                )

    def _draw_dead_nics(self) -> None:
        """Cross out dead NICs of live servers: to the right in the first dimension, below in the second."""
        for server in self._fabric.servers:
            x, y = self._at(server)
            for level in range(self._fabric.levels):
                if self._fabric.group(server, level) < 0 or self._fabric.nic_alive(server, level):
                    continue
                if not self._killed_by_own_failure(server, level):
                    continue
                right = level // self._per_dimension % 2 == 0
                place = (x + 0.3, y + 0.12) if right else (x + 0.12, y - 0.3)
                self._axis.plot(*place, marker="x", color=_RED, markersize=7, markeredgewidth=2.2, zorder=6)

    def _killed_by_own_failure(self, server: int, level: int) -> bool:
        """Whether the NIC itself or its switch failed."""
        switch = SwitchFailure(level, self._fabric.group(server, level))
        return bool({LinkFailure(server, level), switch} & self._fabric.failures)


def _legend(figure: Any, made: Plan, root: int) -> None:
    lines = importlib.import_module("matplotlib.lines")
    wiring = made.fabric.wiring
    dimensions = wiring.dimensions if isinstance(wiring, Torus) else wiring.levels
    word = "level" if isinstance(wiring, BCube) else "dimension"
    handles = [
        lines.Line2D([], [], color=_LEVELS[i % len(_LEVELS)], lw=2, label=f"hop over {word} {i}")
        for i in range(dimensions)
    ]
    if made.fabric.failures:
        handles.append(lines.Line2D([], [], color=_RED, lw=2, ls=(0, (4, 2)), label="detour, hop by hop"))
        ring = {"marker": "o", "ls": "", "mec": _RED, "mfc": "white", "mew": 2.2, "ms": 10}
        handles.append(lines.Line2D([], [], label="relay", **ring))
        handles.append(lines.Line2D([], [], color=_RED, marker="x", ls="", mew=2.2, ms=8, label="dead"))
    handles.append(lines.Line2D([], [], color=_INK, marker="o", ls="", ms=10, label="root"))
    figure.legend(handles=handles, loc="lower center", ncols=min(4, len(handles)), frameon=False, fontsize=10)
    figure.suptitle(
        f"How partial sums are reduced to server {root}; thicker is later"
        + ("" if made.forest.broadcast else ", results are broadcast the same way"),
        fontsize=12,
        color=_INK,
    )
    figure.tight_layout(rect=(0, 0.07, 1, 0.98))
