"""The training state as bytes, and back into a joiner's own arrays."""

import numpy as np
import pytest

from bml.train.ledger import Ledger
from bml.train.snapshot import restore, snapshot
from topology.errors import UsageError


def state(fill: float) -> dict[str, object]:
    return {
        "params": {"w": np.full((3, 4), fill, "float32"), "b": np.full(5, fill, "float64")},
        "momentum": [np.full(2, int(fill), "int64"), np.full((0, 3), fill, "float32")],
        "note": None,
    }


def whole(made: object) -> memoryview:
    return memoryview(bytearray(made[0 : len(made)]))  # type: ignore[index, arg-type]


def test_a_joiner_gets_the_values_in_its_own_arrays() -> None:
    given, taken = state(3.5), state(0.0)
    kept = taken["params"]["w"]  # type: ignore[index]
    manifest = restore(whole(snapshot(given, 1, 17, (0, 2), None)), taken)
    assert (manifest.loop, manifest.index, manifest.contributors, manifest.ledger) == (1, 17, (0, 2), None)
    assert kept.tolist() == [[3.5] * 4] * 3
    assert taken["params"]["b"].tolist() == [3.5] * 5  # type: ignore[index]
    assert taken["momentum"][0].tolist() == [3, 3]  # type: ignore[index]


def test_any_cut_gives_the_same_bytes() -> None:
    made = snapshot(state(2.0), 0, 1, (0, 1, 2), Ledger(10).dump())
    data = whole(made)
    chance = np.random.default_rng(1)
    for _ in range(200):
        start, stop = sorted(chance.integers(0, len(made) + 1, 2).tolist())
        assert bytes(made[start:stop]) == bytes(data[start:stop])


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"params": np.zeros(4, "float32")},
        {"params": {"w": np.zeros((4, 3), "float32"), "b": np.zeros(5)}, "momentum": []},
    ],
)
def test_a_joiner_with_other_arrays_is_told_which(other: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="name the same arrays with session"):
        restore(whole(snapshot(state(1.0), 0, 0, (0,), None)), other)


def test_arrays_that_cannot_be_written_are_refused() -> None:
    mine = {"params": np.zeros(3)}
    mine["params"].flags.writeable = False
    with pytest.raises(UsageError, match="must be writable"):
        restore(whole(snapshot({"params": np.ones(3)}, 0, 0, (0,), None)), mine)


def test_a_ledger_travels_whole() -> None:
    from bml.train.batches import BatchPlan, assignment, used_indices

    plan, ledger = BatchPlan(20, 6, 2), Ledger(20)
    for step, batch in enumerate(plan):
        if step == 5:
            ledger = Ledger.load(ledger.dump())
        used = used_indices(assignment(batch.indices, (0, 1), (0, 1)), recomputed=True)
        ledger.commit(step + 1, batch, (0, 1), used)
    again = Ledger(20)
    for step, batch in enumerate(plan):
        used = used_indices(assignment(batch.indices, (0, 1), (0, 1)), recomputed=True)
        again.commit(step + 1, batch, (0, 1), used)
    assert ledger.summary() == again.summary()
    assert ledger.summary()["complete"]
