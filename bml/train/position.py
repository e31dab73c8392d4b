"""The position of a server in its program: for each open loop, outermost first, its number and its index.

    for epoch in session.steps(3):                      # loop 0
        for batch in session.batches(1000, ...): ...    # loop 0 of that iteration
        for batch in session.batches(50, ...): ...      # loop 1 of that iteration

In batch 7 of the second loop of epoch 2 the path is (0, 2), (1, 7). All servers run the same program, so a
path means the same on each. A server that joins is given a path to go to: it runs its own program, in which
loops before the path end at once, and those on it begin at their index.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable
from typing import NamedTuple

from bml.topology.errors import UsageError
from bml.train.vectors import Described


class Mark(NamedTuple):
    """One loop of a path: its number in its parent's iteration, its own iteration, and its plan."""

    ordinal: int
    iteration: int
    plan: str


Path = tuple[Mark, ...]
LoopId = tuple[int, ...]
"""The ordinals and indices of the loops around a loop, and then its own ordinal."""


class Loop:
    """A loop that is or was open; `index` is that of its current iteration, -1 before the first."""

    __slots__ = (
        "_where",
        "depth",
        "id",
        "index",
        "inner",
        "length",
        "on_leave",
        "open",
        "ordinal",
        "over",
        "plan",
        "thread",
        "usual",
        "weights",
    )

    def __init__(
        self,
        id: LoopId,
        depth: int,
        plan: str,
        length: int,
        on_leave: Callable[[], None],
        around: Described,
        thread: int,
    ):
        # The loops around it do not go on while it is open, so their part is made once: steps may be short.
        text = f"{plan}{around.text}"
        self._where = Described(text, zlib.crc32(f"{id[-1]} {text}".encode(), around.signature))
        self.id = id
        self.depth = depth
        self.ordinal = id[-1]
        self.plan = plan
        self.length = length
        self.on_leave = on_leave
        self.thread = thread
        self.index = -1
        self.inner: list[str] = []
        """The plans of the loops inside that its current iteration has come to."""
        self.weights: list[int] = []
        """The weights of those of them that are over, …"""
        self.usual: list[int] = []
        """… and what they were in the iterations before: the last one in which there was such a loop."""
        self.open = True
        self.over = False
        """Its iterator has ended. It is still to be left if a signal's handler interrupted that, or if
        another thread dropped the iterator."""

    def described(self) -> Described:
        """Describe its iteration, and those of the loops around it."""
        where = self._where
        return Described(
            f" in iteration {self.index} of {where.text}", zlib.crc32(b"%d" % self.index, where.signature)
        )

    @property
    def weight(self) -> int:
        """How long it is beside others: its length, times that of the loops in its iterations."""
        return self.length * (sum(self.usual or self.weights) or 1)

    def went_round(self) -> None:
        """An iteration is over: the next one is expected to have the same loops."""
        self.usual = self.weights + self.usual[len(self.weights) :]
        self.weights, self.inner = [], []

    def share(self, ordinal: int, share: float) -> float:
        """The share of an iteration that is done when this share of its inner loop `ordinal` is.

        In the first iteration nobody knows what comes after the first loop inside, so that is the whole.
        """
        if ordinal >= len(self.usual):
            return 1.0 if ordinal else share
        total = sum(self.usual) or 1
        return sum(self.usual[:ordinal]) / total + share * (self.usual[ordinal] / total)


_LENGTH = re.compile(r"(?<=\bepochs=)\d+|(?<=^steps\()\d+")
"""How long a loop is, in the text of its plan."""
_OUTSIDE = Described("", 0)
_OTHERS = "the others are"


class Position:
    """The open loops of one training function. On a joiner also the path to which it is on its way.

    `thread` returns the number of the calling thread.
    """

    def __init__(self, thread: Callable[[], int] = lambda: 0) -> None:
        self._thread = thread
        self._open: list[Loop] = []
        self._outermost: list[str] = []
        """The plans of the loops that it has come to outside of all others."""
        self._done = 0.0
        self._aim: Path | None = None
        self._giver = _OTHERS
        self._may_be_longer = False
        self.passed: dict[LoopId, str] = {}
        """The plans of loops that it passed on its way, as they are over where it goes."""
        self.known: Described | None = None
        """The description of the position, if it was made after the last change."""

    @property
    def path(self) -> Path:
        """The path of the position; at a boundary that of the next iteration."""
        return tuple(Mark(loop.ordinal, loop.index, loop.plan) for loop in self._open)

    @property
    def over(self) -> list[tuple[LoopId, str]]:
        """The plans of the loops that are over and that a server passes on its way here."""
        before: LoopId = ()
        beside, found = self._outermost, []
        for loop in self._open:
            found += [((*before, ordinal), plan) for ordinal, plan in enumerate(beside[: loop.ordinal])]
            before, beside = (*before, loop.ordinal, loop.index), loop.inner
        return found

    def check_passed(self, over: Iterable[tuple[LoopId, str]]) -> None:
        """Raise UsageError if a loop that it passed is another one than it was where `over` comes from."""
        for loop, plan in over:
            if (here := self.passed.get(loop, plan)) != plan:
                raise UsageError(
                    f"the loop {plan} was over, and is {here} here: give it the "
                    "numbers that it had, and add another loop at the end"
                )

    @property
    def done(self) -> float:
        """The share of the outermost loop that is done at its newest boundary, 0 to 1; it never falls.

        Iterations of a loop count as equally long, and loops after one another by their lengths.
        """
        return self._done if self._open else 0.0

    @property
    def aims(self) -> bool:
        """Whether it is on its way to a path that it was given."""
        return self._aim is not None

    @property
    def aim(self) -> str:
        """In words, the path to which it is on its way."""
        return _in_words(self._aim or ())

    @property
    def described(self) -> Described:
        """The position, as a part of the call that servers compare before they reduce."""
        if self.known is None:
            self._leave_over()
            self.known = self._open[-1].described() if self._open else _OUTSIDE
        return self.known

    @property
    def is_inside(self) -> bool:
        """Whether a loop is open."""
        return bool(self._open)

    def is_innermost(self, loop: Loop) -> bool:
        """Whether no loop inside of it is open."""
        return self._open[-1:] == [loop]

    def enter(self, plan: str, length: int, on_leave: Callable[[], None]) -> Loop:
        """Begin a loop inside of the open loops. `on_leave` is called when it is left."""
        self._leave_over()
        outer = self._open[-1] if self._open else None
        beside = self._outermost if outer is None else outer.inner
        before = () if outer is None else (*outer.id, outer.index)
        name, depth = (*before, len(beside)), len(self._open)
        beside.append(plan)
        loop = Loop(name, depth, plan, length, on_leave, self.described, self._thread())
        self._open.append(loop)
        self.known = None
        if outer is None:
            self._done = 0.0
        return loop

    def advance(self, loop: Loop, index: int) -> int:
        """Come to the boundary before iteration `index` of a loop: loops inside of it are left.

        Returns the index of the iteration that comes next, or the loop's length if the loop is to end. Raises
        UsageError for a loop that was left already, and if the path to which it is on its way was missed.
        """
        if not loop.open:
            raise UsageError(
                f"{loop.plan} was left when a loop around it or beside it went on: loops cannot take turns, "
                "as in zip; put one inside of the other"
            )
        for inner in self._open[: loop.depth : -1]:
            self.leave(inner)
        self.known = None
        loop.went_round()
        loop.index = index if self._aim is None else self._on_the_way(self._aim, loop, index)
        self._done = max(self._done, self._share())
        return loop.index

    def leave(self, loop: Loop) -> None:
        """Leave a loop that is over, or was left by break or an exception, and all loops inside of it."""
        while loop.open:
            left = self._open[-1]
            left.on_leave()  # if a signal's handler raises in it, the loop is left later
            left.open = False
            self.known = None
            self._open.pop()
            if self._open:
                self._open[-1].weights.append(left.weight)

    def leave_here(self, loop: Loop) -> None:
        """Leave a loop that is over, in the thread in which it began; in others it is left later.

        Python may collect an iterator in any thread. The thread of the steps would wait for itself.
        """
        if self._thread() == loop.thread:
            self.leave(loop)

    def _share(self) -> float:
        """The share of the outermost loop that is done, as far as is known."""
        share, inner = 0.0, None
        for loop in reversed(self._open):
            if inner is not None:
                share = loop.share(inner.ordinal, share)
            # Whole numbers are divided first: no length is too large for that.
            share = max(0, loop.index) / loop.length + share * (1 / loop.length) if loop.length else 1.0
            inner = loop
        return min(1.0, share)

    def _leave_over(self) -> None:
        """Leave loops whose iterators have ended but were not left, see `Loop.over`."""
        while self._open and self._open[-1].over:
            self.leave(self._open[-1])

    def leave_all(self) -> None:
        """Leave all loops at the end of the function. Raises UsageError if it did not reach its path."""
        if self._open:
            self.leave(self._open[0])
        if self._aim is not None:
            raise self._missed(self._aim)

    def go_to(self, path: Path, giver: str = _OTHERS, may_be_longer: bool = False) -> None:
        """Go to this path, where the `giver` of a state was, from the next boundary on.

        With `may_be_longer` the loops on it may have other lengths, and go on for longer, or less long.
        """
        self._aim, self._giver, self._may_be_longer = path, giver, may_be_longer

    def _on_the_way(self, aim: Path, loop: Loop, index: int) -> int:
        """Return the index at which a loop goes on; its length if the path does not lead into it."""
        outer = [(each.ordinal, each.index) for each in self._open[: loop.depth]]
        if loop.depth >= len(aim) or outer != [mark[:2] for mark in aim[: loop.depth]]:
            return loop.length
        mark = aim[loop.depth]
        if loop.ordinal < mark.ordinal:
            self.passed[loop.id] = loop.plan
            return loop.length
        if loop.ordinal > mark.ordinal or index > mark.iteration:
            raise self._missed(aim)
        if loop.plan != mark.plan and not (
            self._may_be_longer and _LENGTH.sub("", loop.plan) == _LENGTH.sub("", mark.plan)
        ):
            raise UsageError(
                f"this server comes to the loop {loop.plan}, {self._giver} in {mark.plan} there: all servers "
                "must come to the same loops, and give them the same numbers"
            )
        if mark.iteration > loop.length - (loop.depth < len(aim) - 1):
            raise UsageError(
                f"{self._giver} in iteration {mark.iteration} of {mark.plan}, and {loop.plan} ends before: "
                "give the loop as many iterations, or more"
            )
        if loop.depth == len(aim) - 1:
            self._aim = None
        return mark.iteration

    def _missed(self, aim: Path) -> UsageError:
        return UsageError(
            f"this server did not come to where {self._giver}: {_in_words(aim)}; a training function must "
            "come to the same loops on every server, also on one that skips earlier loops"
        )


def _in_words(path: Path) -> str:
    if not path:
        return "before all loops"
    return " in ".join(f"iteration {mark.iteration} of {mark.plan}" for mark in reversed(path))
