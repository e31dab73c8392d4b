"""Writes random training functions, as Python that a user could have written.

All numbers in them are exact in any order of additions: a sample's gradient is a small whole number that
depends on the parameters, so a share that is computed with the wrong ones shows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from bml.sim.programs.clock import CLOCK
from bml.sim.programs.collectives import LINES, NAMES, ROOTS
from bml.sim.programs.faults import Interrupted
from bml.sim.programs.flaws import FLAWS
from bml.sim.programs.late import LATE_STEP, late_parts

LAYERS = 2
_HEAD = """\
def train(session):
    w = [np.full(3, {first}), np.full((2, 2), 5.0)]
    momentum, count, rate = np.zeros(3), np.zeros((), np.int64), {{"rate": 1.0, "name": "lr"}}
    log = []
{named}    bucket = session.bucket([(3,), (2, 2)], "float64")
    buffer = session.empty(3, "float64")
"""
_NAMED = """\
    session.state(params=w, momentum=[momentum, {"count": count}])
    session.state_fn("rate", rate.update, lambda: rate)
    session.state_fn("log", lambda value: log.__setitem__(slice(None), value), lambda: log)
"""


ODD = (
    "None",
    "True",
    "2**70",
    "-3",
    "'\\udcff'",
    "b'\\x00'",
    "[[1.5], {'a': None}]",
    "np.float16(2)",
    "np.eye(2)",
)
"""Values of a state's function that change their kind from step to step."""


def gradient(layer: int, indices: Any, w: Sequence[Any]) -> Any:
    """The gradient of a layer, summed over samples: it depends on both layers, and takes virtual time."""
    CLOCK.compute(len(indices))
    shift = int(w[0].flat[0]) + 3 * int(w[1].flat[0])
    rows = (indices[:, None] * (layer + 2) + np.arange(w[layer].size) + shift) % 19
    return rows.sum(axis=0).astype(np.float64).reshape(w[layer].shape)


class Program(NamedTuple):
    """A training function as text; `flaw` names its mistake, `errors` the errors that may follow.

    `is_exact`: every sample is used, whatever fails. `between`: it calls the session outside of loops, which
    a server that joins cannot do.
    """

    text: str
    flaw: str
    errors: tuple[str, ...]
    is_exact: bool
    between: bool

    def compiled(self) -> Callable[[Any], Any]:
        """The function."""
        names: dict[str, Any] = {"np": np, "gradient": gradient, "Interrupted": Interrupted, **NAMES}
        exec(compile(self.text, "<program>", "exec"), names)
        train: Callable[[Any], Any] = names["train"]
        return train


class Writer:
    """Writes one program; `flawed` ones do something that they must be told."""

    def __init__(self, chance: random.Random, flawed: bool):
        self._chance = chance
        self._lines: list[str] = []
        self._depth = 1
        self._names = 0
        self._is_exact = True
        self._between = False
        self._flaw = chance.choice(sorted(FLAWS)) if flawed else ""
        self._flawed = False

    def program(self) -> Program:
        """A program of some loops in a row, each perhaps with others inside."""
        first = self._chance.choice(["4.0", "4.0", "4.0 + session.server"])
        named = _NAMED
        if self._now("names nothing"):  # then nothing makes the servers' states equal at the beginning
            first, named = "4.0", ""
        if self._chance.random() < 0.1:
            self._say("np.seterr(all='raise')")
        for _ in range(self._chance.randint(1, 3)):
            self._loop(0)
            if self._chance.random() < 0.2:
                self._between = True
                self._metric()
        self._say("return [x.copy() for x in w], momentum.copy(), int(count), rate['rate'], log")
        text = _HEAD.format(first=first, named=named) + "\n".join(self._lines) + "\n"
        flaw = self._flaw if self._flawed else ""
        return Program(text, flaw, FLAWS[flaw] if flaw else (), self._is_exact, self._between)

    # --- text ------------------------------------------------------------------------------------

    def _say(self, line: str) -> None:
        self._lines.append("    " * self._depth + line)

    @contextmanager
    def _block(self, line: str) -> Iterator[None]:
        self._say(line)
        self._depth += 1
        yield
        self._depth -= 1

    def _name(self, stem: str) -> str:
        self._names += 1
        return f"{stem}{self._names}"

    def _now(self, flaw: str) -> bool:
        """Whether the program's flaw comes here."""
        self._flawed |= (comes := self._flaw == flaw and not self._flawed)
        return comes

    # --- loops -----------------------------------------------------------------------------------

    def _loop(self, depth: int) -> None:
        kind = self._chance.choice(
            ["batches", "batches", "steps", "nested"] if depth < 2 else ["batches", "steps"]
        )
        if kind == "batches":
            self._over_batches(depth)
        elif kind == "steps":
            index = self._name("i")
            with self._block(f"for {index} in session.steps({self._chance.randint(0, 4)}):"):
                self._metric()
                if self._chance.random() < 0.2:
                    self._say(LATE_STEP)
                self._count()
                self._stop_early(index)
        else:
            index = self._name("e")
            how = self._chance.choice(["session.steps", "session.steps", "range"])
            with self._block(f"for {index} in {how}({self._chance.randint(1, 3)}):"):
                for _ in range(self._chance.randint(1, 2)):
                    self._loop(depth + 1)

    def _over_batches(self, depth: int) -> None:
        chance, batch = self._chance, self._name("b")
        n = chance.choice([7, 12, 25])
        size = str(chance.choice([3, 5, 8]))
        seed, epochs, balance = str(chance.randint(0, 3)), chance.randint(1, 2), ""
        if chance.random() < 0.12:
            n, size, epochs, balance = 25, "5", chance.randint(3, 4), ", balance=True"
        if self._now("plans differ"):
            what = chance.choice(["seed", "size", "samples", "balance"])
            seed = "session.server" if what == "seed" else seed
            size = f"{size} + session.server" if what == "size" else size
            n_text = f"{n} + session.server" if what == "samples" else str(n)
            balance = ", balance=session.server == 1" if what == "balance" else balance
        else:
            n_text = str(n)
        loop = f"session.batches({n_text}, global_batch={size}, epochs={epochs}, seed={seed}{balance})"
        if self._now("two loops in turn"):
            with self._block(f"for {batch}, other in zip({loop}, session.steps(50)):"):
                self._reduce(batch)
            return
        if late := self._name("late") if chance.random() < 0.3 else "":
            self._say(f"{late} = []")
        kept = self._now("an old batch")
        if kept:
            self._say("earlier = None")
        with self._block(f"for {batch} in {loop}:"):
            if self._now("a server skips a batch"):
                with self._block(f"if session.server == 1 and {batch}.batch_no == 1:"):
                    self._say("continue")
            self._caught(batch, late)
            if kept:
                with self._block("if earlier is not None:"):
                    self._say("earlier.allreduce(gradient(0, earlier.indices, w))")
                self._say(f"earlier = {batch}")
            if chance.random() < 0.3:
                self._count()
            if chance.random() < 0.2:
                self._say("session.barrier()") if late else self._metric()
            if depth < 2 and chance.random() < 0.1:
                self._between = True
                self._loop(depth + 2)
            self._stop_early(f"{batch}.batch_no")
        if self._now("a batch after its loop"):
            self._say(f"{batch}.allreduce(gradient(0, {batch}.indices, w))")

    def _caught(self, batch: str, late: str) -> None:
        """The step of a batch; perhaps a sample is bad, on all servers, or a signal is caught."""
        if late:
            self._lines += ["    " * self._depth + line for line in late_parts(self._chance, batch, late)]
            return
        if self._chance.random() < 0.15:
            with self._block("try:"):
                self._reduce(batch)
            with self._block("except Interrupted:"):
                self._say("pass")
        elif self._chance.random() < 0.1:
            with self._block("try:"):
                with self._block(f"if {batch}.batch_no == {self._chance.randint(1, 3)}:"):
                    self._say("raise ValueError('a bad sample')")
                self._reduce(batch)
            with self._block("except ValueError:"):
                self._say("break")
        else:
            self._reduce(batch)

    def _stop_early(self, index: str) -> None:
        if self._chance.random() < 0.2:
            with self._block(f"if {index} == {self._chance.randint(0, 3)}:"):
                self._say("break")

    # --- steps -----------------------------------------------------------------------------------

    def _count(self) -> None:
        self._say("count += 1")
        self._say("rate['rate'] *= 0.5")
        if self._chance.random() < 0.5:
            self._say(f"log.append({self._chance.choice(ODD)})")

    def _metric(self) -> None:
        chance = self._chance
        if self._now("a server skips a call"):
            with self._block("if session.server != 1:"):
                self._say("session.allreduce(np.ones(3))")
            self._say("momentum += session.allreduce(np.zeros(3))")
            return
        if self._now("roots differ"):
            self._say("momentum += session.broadcast(w[0], session.server % 2)")
            return
        if chance.random() < 0.5:
            self._collective()
            return
        kind = chance.choice(["max", "sum", "async", "one", "scalar", "list", "barrier"])
        if kind == "max":
            self._say("momentum += session.allreduce(w[0], 'max', shared=True)")
        elif kind == "sum":
            self._say("momentum += session.allreduce(np.floor(w[0])) / len(session.contributors)")
        elif kind == "async":
            handle = self._name("h")
            self._say(f"{handle} = session.allreduce_async(np.floor(w[0]), 'min')")
            self._say(f"momentum += {handle}.wait()")
        elif kind == "one":  # a list is copied, so that its arrays may change at once
            handle = self._name("h")
            self._say("given = [np.floor(w[0])]")
            self._say(f"{handle} = session.allreduce_async(given, 'max')")
            self._say("given[0][:] = 0")
            self._say(f"momentum += {handle}.wait()[0]")
        elif kind == "scalar":
            self._say("momentum += float(session.allreduce(np.int8(100)) / len(session.contributors))")
        elif kind == "list":
            self._say("momentum += session.allreduce([np.ones(3), np.ones(2)], 'prod')[0]")
        else:
            self._say("session.barrier()")

    def _collective(self) -> None:
        """One of the collectives beside a plain allreduce, blocking or begun."""
        begins, waits = self._chance.choice([("", ""), ("_async", ".wait()")])
        root, got = self._chance.choice(ROOTS), self._name("got")
        for line in self._chance.choice(LINES):
            self._say(line.format(a=begins, w=waits, root=root, got=got))

    def _reduce(self, batch: str) -> None:
        """A step of training, in one of the ways in which users write it."""
        if self._now("recompute raises"):
            self._broken_recompute(batch)
            return
        if self._now("changed before it is committed"):
            self._changed(batch)
            return
        if self._now("recompute makes a call"):
            self._calling_recompute(batch)
            return
        ways = [self._plain, self._buffer, self._list, self._bucket, self._overlap, self._early, self._narrow]
        self._chance.choice(ways)(batch)
        if self._chance.random() < 0.2:
            self._say("session.samples()")

    def _recompute(self, *body: str) -> str:
        """A function of the samples' indices `i`; returns its name."""
        name = self._name("again")
        with self._block(f"def {name}(i):"):
            for line in body:
                self._say(line)
        return name

    def _plain(self, batch: str) -> None:
        layer = self._chance.randrange(LAYERS)
        again = ""
        if self._chance.random() < 0.9:
            again = f", recompute=lambda i: gradient({layer}, i, w)"
        else:
            self._is_exact = False
        self._say(f"w[{layer}] -= {batch}.allreduce(gradient({layer}, {batch}.indices, w){again})")

    def _buffer(self, batch: str) -> None:
        """One preallocated buffer for every gradient, also those of recompute."""
        again = self._recompute("buffer[:] = gradient(0, i, w)", "return buffer")
        self._say(f"w[0] -= {batch}.allreduce({again}({batch}.indices), recompute={again})")

    def _list(self, batch: str) -> None:
        again, got = self._recompute("return [gradient(0, i, w), gradient(1, i, w)]"), self._name("g")
        self._say(f"{got} = {batch}.allreduce({again}({batch}.indices), recompute={again})")
        self._update(got)

    def _bucket(self, batch: str) -> None:
        fills = "bucket[0][...], bucket[1][...] = gradient(0, i, w), gradient(1, i, w)"
        again, got = self._recompute(fills, "return bucket"), self._name("g")
        self._say(f"{got} = {batch}.allreduce({again}({batch}.indices), recompute={again})")
        self._update(got)

    def _update(self, got: str) -> None:
        self._say(f"w[0] -= {got}[0]")
        self._say(f"w[1] -= {got}[1]")

    def _overlap(self, batch: str) -> None:
        """Parts that go on beside the backward pass; each layer is updated when its part is there."""
        chance, parts = self._chance, self._name("parts")
        memory = chance.random() < 0.5
        self._say(f"{parts} = []")
        with self._block("for layer in (1, 0):"):
            with self._block("def again(i, layer=layer):"):
                if memory:  # one bucket for all parts: recompute of one writes over the others
                    self._say("bucket[0][...], bucket[1][...] = gradient(0, i, w), gradient(1, i, w)")
                    self._say("return bucket[layer]")
                else:
                    self._say("return gradient(layer, i, w)")
            self._say(
                f"{parts}.append((layer, {batch}.allreduce_async(again({batch}.indices), recompute=again)))"
            )
        order = chance.choice([parts, f"reversed({parts})"])
        with self._block(f"for layer, part in {order}:"):
            self._say("w[layer] -= part.wait()")

    def _early(self, batch: str) -> None:
        """Parts that are used before the others are there; the old parameters are kept for recompute."""
        self._say("old = [x.copy() for x in w]")
        if self._chance.random() < 0.5:
            self._say(
                f"w[0] -= {batch}.allreduce(gradient(0, {batch}.indices, old), "
                "recompute=lambda i: gradient(0, i, old), early=True)"
            )
            self._say(
                f"w[1] -= {batch}.allreduce(gradient(1, {batch}.indices, old), "
                "recompute=lambda i: gradient(1, i, old))"
            )
            return
        with self._block("for layer in (0, 1):"):
            self._say(
                f"part = {batch}.allreduce_async(gradient(layer, {batch}.indices, old), "
                "recompute=lambda i, layer=layer: gradient(layer, i, old), early=True)"
            )
            self._say("w[layer] -= part.wait()")

    def _narrow(self, batch: str) -> None:
        """Dtypes in which a sum of a whole batch may not wrap, nor its size be infinite."""
        dtype = self._chance.choice(["uint8", "int8", "int32", "float16", "float32"])
        value = "[len(i), 3 * len(i), 0]"
        again = f"lambda i: np.array({value}, np.{dtype})"
        given = value.replace("len(i)", f"len({batch}.indices)")
        self._say(f"momentum += {batch}.allreduce(np.array({given}, np.{dtype}), recompute={again})")

    # --- flaws -----------------------------------------------------------------------------------

    def _broken_recompute(self, batch: str) -> None:
        again = self._recompute("raise OSError('the data set cannot be reached')")
        with self._block("try:"):
            self._say(f"w[0] -= {batch}.allreduce(gradient(0, {batch}.indices, w), recompute={again})")
        with self._block("except OSError:"):
            self._say("pass")

    def _changed(self, batch: str) -> None:
        given, handle = self._name("g"), self._name("h")
        self._say(f"{given} = gradient(0, {batch}.indices, w) + 1.0")
        self._say(f"{handle} = {batch}.allreduce_async({given}, recompute=lambda i: gradient(0, i, w) + 1.0)")
        self._say(f"{given}[:] = -1.0")
        self._say(f"w[0] -= {handle}.wait()")

    def _calling_recompute(self, batch: str) -> None:
        again = self._recompute("session.barrier()", "return gradient(0, i, w)")
        self._say(f"w[0] -= {batch}.allreduce(gradient(0, {batch}.indices, w), recompute={again})")
