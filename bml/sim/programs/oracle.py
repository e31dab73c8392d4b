"""The same training program on one process without faults: the numbers that every server must have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import numpy as np

from bml.train.batches import BatchPlan, GlobalBatch
from bml.train.vectors import Bucket


class _Over:
    """A step that is over as soon as it is begun; what follows it comes when it is waited for."""

    def __init__(self, result: Any, before: Callable[[], None] = lambda: None, then: Any = None):
        self.done = True
        self._result = result
        self._before = before
        self._then = then

    def wait(self) -> Any:
        """The result."""
        self._before()
        then, self._then = self._then, None
        if then is not None:
            then(self._result)
        return self._result


class _Loop:
    """The right ledger of one loop over batches."""

    def __init__(self, plan: BatchPlan):
        self.plan = plan
        self.steps = self.left_out = 0
        self.is_over = False

    def row(self) -> tuple[str, int, int, str]:
        """Plan, committed batches, samples left out, and how it ended."""
        n = len(self.plan)
        end = "whole" if self.steps == n else f"left after {self.steps} of {n} batches"
        return str(self.plan), self.steps, self.left_out, end if self.is_over else "open"


class OracleBatch:
    """A whole global batch; `parts` of its gradient were given."""

    def __init__(self, whole: GlobalBatch, session: OracleSession):
        self._session = session
        self.epoch_no, self.batch_no, self.indices = whole.epoch_no, whole.batch_no, whole.indices
        self.parts = 0

    def allreduce(self, gradient: Any, recompute: Any = None, *, early: bool = False) -> Any:
        """The mean."""
        self._session.drain()
        return self._mean(gradient)

    def _mean(self, gradient: Any) -> Any:
        self.parts += 1
        if isinstance(gradient, list | tuple):
            return [_mean(np.asarray(each), len(self.indices)) for each in gradient]
        return _mean(np.asarray(gradient), len(self.indices))

    def allreduce_async(
        self,
        gradient: Any,
        recompute: Any = None,
        *,
        early: bool = False,
        priority: int | None = None,
        then: Any = None,
    ) -> _Over:
        """The mean, already."""
        return self._session.begin(self._mean(gradient), priority, then)


class OracleSession:
    """A Session of one server that does the work of all; `server` is the one that it is taken for."""

    joins = replays = False

    def __init__(self, servers: Sequence[int], server: int):
        self.server = server
        self.contributors = tuple(servers)
        self.n_servers = len(self.contributors)
        self.loops: list[_Loop] = []
        self._open: list[tuple[_Loop, OracleBatch]] = []
        self._late: list[_Over] = []

    def state(self, **arrays: Any) -> None:
        """Nobody joins here."""

    def state_fn(self, key: str, load: Callable[[Any], None], save: Callable[[], Any]) -> None:
        """Nobody joins here."""

    def empty(self, shape: Any, dtype: Any = "float32") -> Any:
        """Any memory."""
        return np.empty(shape, dtype)

    def bucket(self, shapes: Sequence[tuple[int, ...]], dtype: Any = "float32") -> Bucket:
        """Arrays in one piece."""
        vector = np.empty(sum(map(prod, shapes)), dtype)
        parts = np.split(vector, np.cumsum([prod(shape) for shape in shapes])[:-1])
        made = Bucket(part.reshape(shape) for part, shape in zip(parts, shapes, strict=True))
        made.vector = vector
        return made

    def allreduce(self, array: Any, op: str = "sum", *, shared: bool = False, out: Any = None) -> Any:
        """As if every server had brought this. `out` has it already, as it is given in place only."""
        self.drain()
        return self._reduced(array, op)

    def _reduced(self, array: Any, op: str) -> Any:
        if isinstance(array, list):
            return [self._reduced(each, op) for each in array]
        whole, n = np.array(array), len(self.contributors)
        if op in ("min", "max", "avg") or whole.dtype == bool:
            return whole
        if whole.dtype.kind in "iu":
            whole = whole.astype(np.int64)
        return whole * n if op == "sum" else whole**n

    def allreduce_async(
        self,
        array: Any,
        op: str = "sum",
        *,
        shared: bool = False,
        out: Any = None,
        priority: int | None = None,
        then: Any = None,
    ) -> _Over:
        """The result, already."""
        given = [np.array(each) for each in array] if isinstance(array, list) else np.array(array)
        return self.begin(self._reduced(given, op), priority, then)

    def begin(self, result: Any, priority: int | None, then: Any) -> _Over:
        """A step that may be waited for late, if it has a priority."""
        if priority is None:
            return _Over(result, self.drain)
        self._late.append(_Over(result, then=then))
        return self._late[-1]

    def drain(self) -> None:
        """Wait for all that was begun."""
        late, self._late = self._late, []
        for each in late:
            each.wait()

    def broadcast(self, array: Any, root: int = 0, *, out: Any = None) -> Any:
        """As if the root had brought this."""
        return [np.array(each) for each in array] if isinstance(array, list) else np.array(array)

    def all_gather(self, array: Any, *, out: Any = None) -> Any:
        """As if every server had brought this."""
        return [np.array(array) for _ in self.contributors]

    def gather(self, array: Any, root: int = 0) -> Any:
        """As if every server had brought this."""
        return self.all_gather(array) if self.server == root else None

    def all_to_all(self, arrays: Any) -> Any:
        """As if every server had sent what this one sends to itself."""
        return self.all_gather(arrays[self.server])

    def reduce(self, array: Any, root: int = 0, op: str = "sum") -> Any:
        """As if every server had brought this."""
        return self.allreduce(array, op) if self.server == root else None

    def reduce_scatter(self, arrays: Any, op: str = "sum") -> Any:
        """As if every server had brought these."""
        return self.allreduce(arrays[self.server], op)

    def scatter(self, arrays: Any, root: int = 0) -> Any:
        """As if the root had these."""
        return arrays[self.server]

    def __getattr__(self, name: str) -> Any:
        """The forms NAME_async of these: the result, already."""
        called, _, rest = name.rpartition("_")
        if rest != "async":
            raise AttributeError(name)
        return lambda *given, **named: _Over(getattr(self, called)(*given, **named))

    def barrier(self) -> None:
        """All servers contribute."""
        self.drain()

    def samples(self) -> None:
        """Programs do not look into it."""

    def steps(self, n_steps: int) -> Iterator[int]:
        """Count."""
        self.drain()
        try:
            for index in range(n_steps):
                self._left()
                yield index
        finally:
            self._left()
            self.drain()

    def batches(
        self, n_samples: int, *, global_batch: int, epochs: int, seed: int = 0, balance: bool = False
    ) -> Iterator[OracleBatch]:
        """Whole batches."""
        loop = _Loop(BatchPlan(n_samples, global_batch, epochs, seed, balance))
        self._left()
        self.drain()
        self.loops.append(loop)
        try:
            for whole in loop.plan:
                self._left()
                batch = OracleBatch(whole, self)
                self._open.append((loop, batch))
                yield batch
        finally:
            self._left()
            self.drain()
            loop.is_over = True

    def _left(self) -> None:
        for loop, batch in self._open:
            if batch.parts:
                loop.steps += 1
            else:
                loop.left_out += len(batch.indices)
        self._open.clear()


def _mean(total: Any, n: int) -> Any:
    if total.dtype == np.float16:
        return (total.astype(np.float32) / np.float32(n)).astype(np.float16)
    if np.issubdtype(total.dtype, np.inexact):
        return total / total.dtype.type(n)
    return total.astype(np.uint64 if total.dtype.kind == "u" else np.int64) / n
