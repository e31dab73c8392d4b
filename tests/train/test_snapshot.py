"""The training state as bytes, and back into a joiner's own arrays."""

import numpy as np
import pytest

from bml.topology.errors import UsageError
from bml.train.ledgers import Ledgers
from bml.train.position import Mark
from bml.train.snapshot import manifest_of, restore, snapshot
from bml.train.state import NamedState


def named(values: dict[str, object]) -> NamedState:
    state = NamedState()
    state.name(values)
    return state


def state(fill: float) -> dict[str, object]:
    return {
        "params": {"w": np.full((3, 4), fill, "float32"), "b": np.full(5, fill, "float64")},
        "momentum": [np.full(2, int(fill), "int64"), np.full((0, 3), fill, "float32")],
        "note": None,
        "count": np.full((), fill),
    }


def whole(made: object) -> memoryview:
    return memoryview(bytearray(made[0 : len(made)]))  # type: ignore[index, arg-type]


def test_a_joiner_gets_the_values_in_its_own_arrays() -> None:
    given, taken = state(3.5), state(0.0)
    kept = taken["params"]["w"]  # type: ignore[index]
    path = (Mark(1, 0, "steps(3)"), Mark(0, 17, "steps(20)"))
    data = whole(snapshot(named(given), path, (0, 2), b"ledgers"))
    restore(data, named(taken))
    manifest = manifest_of(data)
    assert (manifest.path, manifest.contributors, manifest.ledgers) == (path, (0, 2), b"ledgers")
    assert kept.tolist() == [[3.5] * 4] * 3
    assert taken["params"]["b"].tolist() == [3.5] * 5  # type: ignore[index]
    assert taken["momentum"][0].tolist() == [3, 3]  # type: ignore[index]
    assert taken["count"] == 3.5


def test_any_cut_gives_the_same_bytes() -> None:
    made = snapshot(named(state(2.0)), (), (0, 1, 2), Ledgers().dump())
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
    given = state(1.0)
    with pytest.raises(UsageError, match="name the same arrays with session"):
        restore(whole(snapshot(named(given), (), (0,), b"")), named(other))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.broadcast_to(1.0, 3), "read-only"),
        (np.array(["a", None], object), "dtype object"),
        ({0: np.zeros(2), "b": np.zeros(3)}, "keys that are not texts"),
        (0.5, "is a float: name arrays"),
        ({"opt": [np.zeros(2), "adam"]}, r"'lr.opt\[1\]' is a str"),
        (np.float64(3), "is a float64"),
    ],
)
def test_what_a_joiner_could_not_be_given_is_refused_when_it_is_named(value: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        named({"lr": value})


def test_values_behind_functions_arrive_as_they_were() -> None:
    value = {
        "rate": 0.1,
        "names": ["a", None],
        "steps": np.int32(7),
        "m": np.arange(4.0).reshape(2, 2),
        "b": b"x",
    }
    taken: dict[str, object] = {}
    given, mine = NamedState(), NamedState()
    given.name_function("opt", lambda value: None, lambda: value)
    mine.name_function("opt", taken.update, dict)
    restore(whole(snapshot(given, (), (0,), b"")), mine)
    assert list(taken) == list(value)
    assert (taken["rate"], taken["names"], taken["steps"], taken["b"]) == (0.1, ["a", None], 7, b"x")
    np.testing.assert_array_equal(taken["m"], value["m"])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="a set"):
        given.name_function("bad", lambda value: None, lambda: {1, 2})
    other = NamedState()
    with pytest.raises(UsageError, match=r"state_fn for \[\], the others have \['opt'\]"):
        restore(whole(snapshot(given, (), (0,), b"")), other)


def test_a_ledger_travels_whole() -> None:
    from bml.train.batches import BatchPlan, assignment, used_indices
    from bml.train.ledger import Ledger

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


def refusal_of(made: NamedState) -> str:
    return manifest_of(whole(snapshot(made, (), (0,), b""))).refusal


class NoOwner(np.ndarray):  # type: ignore[type-arg]
    """As the base of an array of session.empty, see bml.io.memory.Block."""

    on_gone = print


def in_foreign_memory() -> "np.ndarray[tuple[int, ...], np.dtype[np.float64]]":
    memory = np.zeros(24, np.uint8)
    return np.ndarray(3, np.float64, NoOwner((24,), np.uint8, memory))


@pytest.mark.parametrize("make", [lambda: np.zeros(3), in_foreign_memory, lambda: np.zeros(6)[::2]])
@pytest.mark.parametrize("shape", [lambda w: w, lambda w: [w], lambda w: {"a": (w,)}])
def test_an_array_that_was_bound_anew_is_given_to_no_joiner(make: object, shape: object) -> None:
    w = make()  # type: ignore[operator]
    made = named({"params": shape(w)})  # type: ignore[operator]
    assert refusal_of(made) == ""
    w -= 1.0
    assert refusal_of(made) == ""
    w = w - 1.0
    assert "no longer uses an array of the state 'params': `w = w - g` makes a new array" in refusal_of(made)


def test_a_program_that_named_nothing_has_no_state_to_give_unless_it_says_so() -> None:
    made = NamedState()
    assert "the training function has named nothing" in refusal_of(made)
    made.name({})
    assert refusal_of(made) == ""
    by_function = NamedState()
    by_function.name_function("epoch", print, lambda: 1)
    assert refusal_of(by_function) == ""


def test_arrays_that_the_program_can_still_see_are_given() -> None:
    whole_of_it = np.zeros(6)
    parts = [whole_of_it[:3], whole_of_it[3:]]
    made = named({"params": [whole_of_it[:3]], "more": {"view": whole_of_it[3:].reshape(3, 1)}})
    del whole_of_it
    assert refusal_of(made) == ""
    parts[0][:] = 1
    listed = [np.zeros(2)]
    held = named({"params": listed, "foreign": np.frombuffer(bytearray(8), np.uint8)})
    listed[0] = listed[0] - 1  # the list is looked at again
    assert refusal_of(held) == ""


def test_what_never_changed_is_given_to_no_joiner() -> None:
    kept = w = np.zeros(3)
    momentum = np.zeros(2)
    made = named({"params": w, "momentum": [momentum]})
    for step in range(9):
        assert made.watch(step) == ""
        w = w - 1.0
    assert refusal_of(made) == ""
    assert "have not changed in 10 steps" in made.watch(10)
    assert "nothing that was named with session.state has ever changed" in refusal_of(made)
    for array in (kept, momentum):
        array -= 1.0
        assert refusal_of(made) == ""
        array += 1.0


@pytest.mark.parametrize("dtype", ["f4", "c16"])
def test_elements_that_are_no_numbers_are_said_once(dtype: str) -> None:
    w, other = np.ones((3, 2), dtype), np.full(2, np.nan)
    made = named({"params": [np.zeros(2), w], "other": other, "count": np.zeros(0)})
    said = []
    for step in range(300):
        w += 1.0
        if step == 42:
            w[2, 1] = np.nan
        said.append(made.watch(step))
    assert [step for step, text in enumerate(said) if text] == [100]
    assert "after step 100 params[1] of the state has elements that are no numbers (NaN)" in said[100]
    assert made.nan() == ["params[1]"]


def test_without_params_all_arrays_must_be_numbers() -> None:
    assert named({"w": np.array([1.0, np.nan], "f4"), "n": np.arange(3), "v": np.ones(2)}).nan() == ["w"]


def test_a_function_that_raises_ends_no_healthy_job() -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    values: list[object] = [1]
    made = NamedState()
    made.name_function("v", print, lambda: values[-1])
    for raised, said in ((OSError("no \ud800 disk"), "OSError: no \\ud800 disk"), (Odd(), "Odd")):
        values.append(raised)

        def save(raised: Exception = raised) -> None:
            raise raised

        made._functions["v"] = (print, save)
        assert refusal_of(made) == said


def test_a_state_that_contains_itself_is_refused_when_it_is_named() -> None:
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(UsageError, match="'params' contains itself"):
        named({"params": endless})
    with pytest.raises(UsageError, match="'v' contains itself"):
        NamedState().name_function("v", print, lambda: endless)
