"""The parts of `bml.torch.attach` that decide alike on all servers, and those that load samples."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from bml.topology.errors import UsageError  # noqa: E402
from bml.torch.attached import layout, plain  # noqa: E402
from bml.torch.attached.ahead import Ahead  # noqa: E402
from bml.torch.attached.source import Source, part  # noqa: E402
from bml.train import state  # noqa: E402

KIB = 1 << 10


def test_buckets_are_neighbours_in_reverse_order() -> None:
    sizes = [("float32", each * KIB) for each in (2000, 10, 900, 10, 600, 10)]
    assert layout.buckets(sizes, 4000 * KIB) == [(5, 4, 3, 2), (1, 0)], "the first one is full at 1 MiB"
    assert layout.buckets(sizes, 500 * KIB) == [(5, 4), (3, 2), (1, 0)]
    assert layout.buckets([("float32", 4)], 1) == [(0,)]


def test_buckets_have_one_dtype_and_are_ordered_by_their_last_gradients() -> None:
    sizes = [("float32", 5), ("float64", 5), ("float32", 5), ("float64", 5)]
    assert layout.buckets(sizes, 100) == [(3, 1), (2, 0)]
    for limit in (1, 5, 6, 11, 100):
        found = layout.buckets(sizes, limit)
        assert sorted(number for bucket in found for number in bucket) == [0, 1, 2, 3]
        assert [bucket[-1] for bucket in found] == sorted((bucket[-1] for bucket in found), reverse=True)
        assert all(len({sizes[number][0] for number in bucket}) == 1 for bucket in found)


def test_a_seed_depends_on_run_batch_and_samples() -> None:
    rows = np.arange(6)
    seeds = {
        layout.seed_of(0, 0, rows),
        layout.seed_of(1, 0, rows),
        layout.seed_of(0, 1, rows),
        layout.seed_of(0, 0, rows[:5]),
        layout.seed_of(0, 0, rows[::-1]),
    }
    assert len(seeds) == 5
    assert layout.seed_of(0, 0, rows) == layout.seed_of(0, 0, np.arange(12)[:6].copy())
    assert all(0 <= seed < 1 << 63 for seed in seeds)


@pytest.mark.parametrize(("n_samples", "n_parts"), [(7, 3), (3, 7), (1, 1), (32, 4), (0, 3)])
def test_cuts_cover_all_samples(n_samples: int, n_parts: int) -> None:
    found = layout.cuts(n_samples, n_parts)
    assert [number for start, stop in found for number in range(start, stop)] == list(range(n_samples))
    assert len(found) == max(1, min(n_samples, n_parts))
    sizes = [stop - start for start, stop in found]
    assert max(sizes) - min(sizes) <= 1


def test_values_of_optimizers_pass_through_a_session() -> None:
    value = [
        {"lr": 0.1, "betas": (0.9, 0.999), "foreach": None, "nested": {"": 1, "a": [True, "x"]}},
        {3: torch.tensor([1.5, 2.5]), "milestones": Counter({30: 2, 80: 1}), "best": float("inf")},
        (),
        None,
    ]
    sent = msgspec.msgpack.encode(state.packed(plain.packed(value), "value"))
    found = plain.unpacked(state.unpacked(msgspec.msgpack.decode(sent)))
    assert torch.equal(found[1].pop(3), value[1].pop(3))  # type: ignore[index,union-attr]
    assert found == value
    assert type(found[1]["milestones"]) is Counter
    assert type(found[0]["betas"]) is tuple
    with pytest.raises(UsageError, match="returned a function"):
        state.packed(plain.packed({"lr_lambda": lambda: 1}), "value")


class Rows(torch.utils.data.Dataset):  # type: ignore[misc]
    """Counts what is loaded in this process."""

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return 100

    def __getitem__(self, number: int) -> float:
        self.loaded.append(number)
        return float(number)


def share(step: int, of: int = 2) -> Any:
    return np.arange(10 * step, 10 * step + 10 // of)


def test_shares_that_were_foretold_are_loaded_once() -> None:
    rows = Rows()
    ahead = Ahead(Source(rows), 10, share, 0, 0)
    for step in range(10):
        assert ahead.fetch(step, share(step)).tolist() == share(step).tolist()
    assert Counter(rows.loaded) == Counter(number for step in range(10) for number in share(step).tolist())
    ahead.close()


def test_shares_that_were_not_foretold_are_right_all_the_same() -> None:
    n_servers = 2
    ahead = Ahead(Source(Rows()), 10, lambda step: share(step, n_servers), 0, 0)
    assert ahead.fetch(0, share(0, 2)).tolist() == [0, 1, 2, 3, 4]
    assert ahead.fetch(1, share(1, 1)).tolist() == list(range(10, 20)), "a server was lost meanwhile"
    n_servers = 1
    assert ahead.fetch(2, share(2, 1)).tolist() == list(range(20, 30))
    assert ahead.fetch(7, share(7, 1)).tolist() == list(range(70, 80)), "a joiner went on later"
    assert ahead.fetch(8, share(8, 1)).tolist() == list(range(80, 90))
    ahead.close()


def test_collated_samples_are_cut_along_their_first_dimension() -> None:
    samples = {
        "x": torch.arange(12).view(6, 2),
        "rest": [torch.arange(6), torch.arange(6)],
        "names": list("abcdef"),
    }
    found = part(samples, 2, 5, 6)
    assert found["x"].tolist() == [[4, 5], [6, 7], [8, 9]]
    assert [each.tolist() for each in found["rest"]] == [[2, 3, 4]] * 2
    assert found["names"] == list("cde")
    for wrong in (torch.zeros(5), (torch.zeros(6), torch.zeros(2)), 3, {"x": torch.tensor(1)}):
        with pytest.raises(UsageError, match="cannot cut"):
            part(wrong, 0, 3, 6)
