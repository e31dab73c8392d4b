"""Rows: bandwidths as nccl-tests counts them, times between completions, columns that line up."""

import pytest

from bml.errors import UsageError
from bml.lab.bench import rows
from bml.lab.bench.rows import Block
from bml.lab.commands.quantities import parse_bytes


def test_bandwidths_and_theory():
    row = rows.row(
        "bml",
        64 << 20,
        9,
        [Block((0.2, 0.1), 0.3, 0.1), Block((0.4,), 0.5, 0.3), Block((), 0.4, 0.2)],
        wrong=0,
        theory_s=0.05,
        bound_s=0.04,
    )
    assert (row.median_s, row.fastest_s, row.slowest_s, row.samples) == (0.2, 0.1, 0.4, 3)
    assert (row.cpu_s, row.system_s) == (0.4, 0.2)
    assert row.cpu_byte_ns == pytest.approx(0.4e9 / (64 << 20))
    assert row.algbw == pytest.approx(0.33554432)
    assert row.busbw == pytest.approx(row.algbw * 16 / 9)
    assert row.count == 16 << 20
    assert (row.ratio, row.over_bound) == pytest.approx((4, 5))
    required = {"who", "size", "median_s", "algbw", "busbw", "wrong", "theory_s", "ratio", "over_bound"}
    assert required <= row.as_json().keys()


def test_a_step_ends_when_the_slowest_server_ends():
    ends_s = {0: [1.0, 2.0, 3.5], 1: [1.5, 1.9, 3.0]}
    assert rows.completions(ends_s) == [0.5, 1.5]


@pytest.mark.parametrize(("step_s", "expected"), [(0.01, 30), (0.02, 15), (1.0, 2), (0.0, 30)])
def test_iterations_fill_a_block_within_limits(step_s, expected):
    assert rows.iterations(step_s, 0.3, 2, 30) == expected


def test_sizes():
    assert rows.sizes("4KiB, 64MiB,4KiB", parse_bytes) == (4096, 64 << 20)
    for text, says in (
        ("", "names no size"),
        ("3", "no vector of float32"),
        ("0", "no vector"),
        ("x", "size"),
    ):
        with pytest.raises(UsageError, match=says):
            rows.sizes(text, parse_bytes)


@pytest.mark.parametrize(("nbytes", "text"), [(4096, "4 KiB"), (64 << 20, "64 MiB"), (1000, "1000 B")])
def test_size_text(nbytes, text):
    assert rows.size_text(nbytes) == text


def test_lines_stand_under_their_heads():
    row = rows.row(
        "openmpi-tcp", 64 << 20, 9, [Block((123.0,), 1.0, 0.5)], wrong=3, theory_s=1.0, bound_s=1.0
    )
    names, units = rows.heading().splitlines()
    line = rows.line(row)
    assert len(line) == len(names) == len(units)
    assert line.index("openmpi-tcp") + len("openmpi-tcp") == names.index("who") + len("who")
    assert line.split()[-5:] == ["1000000.0", "500000.0", "14.901", "-", "-"]
