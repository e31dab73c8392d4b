"""Named values that lie elsewhere, behind arrays that mirror them: a joiner is given what is there now."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from model_jobs import results

from bml.sim.programs.faults import Faults
from bml.train.position import Mark
from bml.train.snapshot import restore, snapshot
from bml.train.state import Mirror, NamedState

PATH = (Mark(0, 1, "steps(2)"),)


class Elsewhere(Mirror):
    """Numbers of which the array is a copy, as old as the last `read`."""

    def __init__(self, *numbers: float):
        self.values = np.array(numbers)
        self._array = np.full(len(numbers), np.nan)
        self.n_reads = self.n_writes = 0

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self._array

    def read(self) -> None:
        self.n_reads += 1
        self._array[:] = self.values

    def write(self) -> None:
        self.n_writes += 1
        self.values[:] = self._array


def named(**values: Any) -> NamedState:
    state = NamedState()
    state.name(values)
    return state


def test_a_snapshot_has_the_values_of_now_and_is_restored_into_them() -> None:
    mine, plain, other = Elsewhere(1, 2), np.array([3.0]), Elsewhere(9)
    theirs = {"params": {"a": Elsewhere(0, 0), "b": np.zeros(1)}, "optimizer": [Elsewhere(0)]}
    state = named(params={"a": mine, "b": plain}, optimizer=[other])
    mine.values += 4
    sent = snapshot(state, PATH, (0,), b"")
    mine.values += 1  # the user goes on while it is sent
    joined = named(**theirs)
    restore(memoryview(bytes(sent[0 : len(sent)])), joined)
    assert theirs["params"]["a"].values.tolist() == [5, 6]
    assert theirs["params"]["b"].tolist() == [3]
    assert theirs["optimizer"][0].values.tolist() == [9]
    assert (other.n_writes, theirs["optimizer"][0].n_writes) == (0, 1)


@pytest.mark.parametrize("whole", [False, True])
def test_a_digest_is_that_of_plain_arrays_and_reads_no_more_than_it_needs(whole: bool) -> None:
    mine, other = Elsewhere(1, 2), Elsewhere(9)
    found = named(params=[mine], optimizer=other).digest(whole)
    assert found == named(params=[np.array([1.0, 2])], optimizer=np.array([9.0])).digest(whole)
    assert (mine.n_reads, other.n_reads) == (1, int(whole))
    assert named(some=Elsewhere(9)).digest() == named(some=np.array([9.0])).digest()


@pytest.mark.parametrize("changes", [False, True])
def test_values_that_never_change_are_noticed(changes: bool) -> None:
    mine = Elsewhere(1)
    state = named(params=mine)
    said = []
    for step in range(20):
        mine.values += changes
        said.append(state.watch(step))
    assert [bool(each) for each in said] == [False] * 10 + [not changes] + [False] * 9
    assert mine.n_reads <= 3, "they are not read at every boundary"
    refusal = snapshot(state, PATH, (0,), b"")
    assert (b"has ever changed" in bytes(refusal[0 : len(refusal)])) is not changes


def test_servers_that_differ_and_those_that_join_get_the_values_of_others() -> None:
    def train(session: Any) -> Any:
        mine = Elsewhere(session.server + 1.0, 2)
        session.state(params=mine)
        for _ in session.steps(12):
            mine.values += session.allreduce(np.array([1.0, 0]), "max")
        return mine.values.tolist(), session.digest()

    with pytest.warns(UserWarning, match="the servers began with different states"):
        ends = results(train, 3, Faults(kills={2: (4, "brought")}, joins=[(7, 2)], holds_for_joiners=True))
    assert sorted(ends) == [0, 1, 2]
    assert len({digest for _, digest in ends.values()}) == 1
    assert [values for values, _ in ends.values()] == [[13, 2]] * 3
