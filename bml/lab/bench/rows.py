"""The rows of a benchmark of allreduce, like those of nccl-tests, with theory and comparison. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from bml.errors import UsageError

GIGA = 1e9
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


class Traffic(NamedTuple):
    """Bytes that all ranks sent and received, and bytes that their processes copied for that."""

    nbytes_sent: int
    nbytes_received: int
    nbytes_copied_sent: int
    nbytes_copied_received: int
    nbytes_zero_copy_sent: int = 0
    nbytes_zero_copy_received: int = 0

    def since(self, before: Traffic) -> Traffic:
        """Return the difference to an earlier count."""
        return Traffic(*(now - then for now, then in zip(self, before, strict=True)))


@dataclass(frozen=True)
class Block:
    """A turn of a contender: seconds of every step, and processor seconds of a step on all ranks together.

    `system_s` is the part of `cpu_s` in the kernel. `traffic` is that of the turn, or None if not known.
    """

    steps_s: tuple[float, ...]
    cpu_s: float
    system_s: float
    traffic: Traffic | None = None


@dataclass(frozen=True)
class Row:
    """One contender at one size.

    `median_s` is the median time of `samples` steps, each between completions by the slowest server;
    `fastest_s` and `slowest_s` are the extremes. `algbw` is size/time, and `busbw` is that times 2(n-1)/n,
    both in GB/s. `wrong` counts wrong elements on all servers. `theory_s` is the time by the cost model, and
    `ratio` the median over it. `bound_s` is the lower bound of all schedules of trees, for bytes over links
    alone, and `over_bound` the median over it. `speedup` is the median over that of bml (None without bml).
    `cpu_s` is the processor time of a step on all servers together, the median over turns. Other load hardly
    changes it; divided by the number of cores, it is the least time on a machine that all servers share.
    `system_s` is the part of it in the kernel, `cpu_byte_ns` is `cpu_s` per byte of the vector, in ns, and
    `cpu_speedup` is `cpu_s` over that of bml (None without bml).
    `copies_sent` and `copies_received` are bytes that the servers' processes copied over bytes moved (None if
    they are not counted). Copies by the kernel or a NIC do not count.
    """

    who: str
    size: int
    count: int
    type: str
    redop: str
    median_s: float
    algbw: float
    busbw: float
    wrong: int
    theory_s: float
    ratio: float
    bound_s: float
    over_bound: float
    speedup: float | None
    fastest_s: float
    slowest_s: float
    cpu_s: float
    system_s: float
    cpu_byte_ns: float
    samples: int
    n_servers: int
    cpu_speedup: float | None = None
    copies_sent: float | None = None
    copies_received: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the row for JSON: times in whole nanoseconds, quotients with four digits."""
        return {key: _rounded(key, value) for key, value in asdict(self).items()}


def row(
    who: str,
    nbytes: int,
    n_servers: int,
    blocks: Sequence[Block],
    wrong: int,
    theory_s: float,
    bound_s: float,
) -> Row:
    """Make the row of these turns of float32 sums, without `speedup`, which needs two contenders."""
    times_s = [step_s for block in blocks for step_s in block.steps_s]
    median_s = statistics.median(times_s)
    algbw = nbytes / median_s / GIGA
    cpu_s = statistics.median(block.cpu_s for block in blocks)
    copies_sent, copies_received = copies(blocks)
    return Row(
        who=who,
        size=nbytes,
        count=nbytes // 4,
        type="float",
        redop="sum",
        median_s=median_s,
        algbw=algbw,
        busbw=algbw * 2 * (n_servers - 1) / n_servers,
        wrong=wrong,
        theory_s=theory_s,
        ratio=median_s / theory_s,
        bound_s=bound_s,
        over_bound=median_s / bound_s,
        speedup=None,
        fastest_s=min(times_s),
        slowest_s=max(times_s),
        cpu_s=cpu_s,
        system_s=statistics.median(block.system_s for block in blocks),
        cpu_byte_ns=cpu_s / nbytes * GIGA,
        samples=len(times_s),
        n_servers=n_servers,
        copies_sent=copies_sent,
        copies_received=copies_received,
    )


def copies(blocks: Sequence[Block]) -> tuple[float | None, float | None]:
    """Return the copies per byte sent, and per byte received, in these turns; None if not known."""
    traffic = [block.traffic for block in blocks if block.traffic is not None]
    moved = Traffic(*map(sum, zip(*traffic, strict=True))) if traffic else None
    if moved is None or not moved.nbytes_sent or not moved.nbytes_received:
        return None, None
    sent, received = (
        moved.nbytes_sent + moved.nbytes_zero_copy_sent,
        moved.nbytes_received + moved.nbytes_zero_copy_received,
    )
    return moved.nbytes_copied_sent / sent, moved.nbytes_copied_received / received


def completions(ends_s: Mapping[int, Sequence[float]]) -> list[float]:
    """Return the times between steps. `ends_s`: rank -> the ends of its steps, the first being the start."""
    slowest = [max(ends) for ends in zip(*ends_s.values(), strict=True)]
    return [after - before for before, after in pairwise(slowest)]


def iterations(step_s: float, block_s: float, fewest: int, most: int) -> int:
    """Return how many steps of about this duration fill a block, within limits."""
    return max(fewest, min(most, round(block_s / max(step_s, 1e-9))))


def sizes(text: str, parse_one: Callable[[str], int]) -> tuple[int, ...]:
    """Read `4KiB,64MiB`: sizes in bytes of float32 vectors, in order, each once.

    Raises:
        UsageError: there is none, or one is not a multiple of 4 bytes.
    """
    found = list(dict.fromkeys(parse_one(part) for part in text.split(",") if part.strip()))
    if not found:
        raise UsageError(f"'{text}' names no size: write --sizes 4KiB,64MiB")
    for nbytes in found:
        if nbytes < 4 or nbytes % 4:
            raise UsageError(f"{nbytes} bytes are no vector of float32: give a multiple of 4")
    return tuple(found)


_COLUMNS = (
    ("size", "(B)", 12),
    ("count", "(elements)", 11),
    ("type", "", 6),
    ("redop", "", 6),
    ("who", "", 12),
    ("time", "(us)", 11),
    ("algbw", "(GB/s)", 8),
    ("busbw", "(GB/s)", 8),
    ("#wrong", "", 7),
    ("theory", "(us)", 11),
    ("ratio", "", 7),
    ("/bound", "", 7),
    ("speedup", "", 8),
    ("cpu", "(us)", 11),
    ("kernel", "(us)", 11),
    ("cpu/B", "(ns)", 8),
    ("/own", "", 6),
    ("copies", "(tx/rx)", 9),
)
"""Name, unit and width."""


def heading() -> str:
    """Return the two lines above the rows."""
    names, units, _ = zip(*_COLUMNS, strict=True)
    return "\n".join("#" + _line(texts)[1:] for texts in (names, units))


def line(each: Row) -> str:
    """Return a row as text, in the columns of the heading."""
    return _line(
        (
            str(each.size),
            str(each.count),
            each.type,
            each.redop,
            each.who,
            f"{each.median_s * 1e6:.1f}",
            f"{each.algbw:.3f}",
            f"{each.busbw:.3f}",
            str(each.wrong),
            f"{each.theory_s * 1e6:.1f}",
            _quotient(each.ratio),
            _quotient(each.over_bound),
            "-" if each.speedup is None else f"{each.speedup:.2f}",
            f"{each.cpu_s * 1e6:.1f}",
            f"{each.system_s * 1e6:.1f}",
            f"{each.cpu_byte_ns:.3f}",
            "-" if each.cpu_speedup is None else f"{each.cpu_speedup:.2f}",
            "-"
            if each.copies_sent is None or each.copies_received is None
            else f"{each.copies_sent:.2f}/{each.copies_received:.2f}",
        )
    )


def size_text(nbytes: int) -> str:
    """Return a size such as `64 MiB`, or in bytes if no unit divides it."""
    for unit, name in _UNITS:
        if nbytes and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def _line(texts: Iterable[str]) -> str:
    return " ".join(text.rjust(width) for text, (_, _, width) in zip(texts, _COLUMNS, strict=True))


def _quotient(value: float) -> str:
    """Return a quotient with three decimals below 10: if links are nearly full, the third one matters."""
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _rounded(key: str, value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return round(value, 9) if key.endswith("_s") else float(f"{value:.4g}")
