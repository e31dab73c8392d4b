"""Rates that connections can be paced to: a segment that is on its way delays the end of the fault."""

from __future__ import annotations

import pytest

from bml.cluster.spec.job import JobSpec
from bml.topology import UsageError


def job(rate: str, fabric: str = "bcube:2x1", detect_s: float = 0.5, emulated: str | None = None) -> JobSpec:
    return JobSpec(
        fabric=fabric, detect_s=detect_s, emulated=emulated, faults=(f"slow:1/0@step=2,rate={rate}",)
    )


@pytest.mark.parametrize(
    ("fabric", "detect_s", "lowest"),
    [("bcube:2x1", 0.5, "1049kbit"), ("bcube:4x1", 0.5, "3146kbit"), ("bcube:2x1", 2.0, "263kbit")],
)
def test_a_rate_at_which_a_segment_takes_longer_than_detect_s_is_refused(
    fabric: str, detect_s: float, lowest: str
) -> None:
    """8kbit for 1 s went on for 65 s: the segment of 64 KiB that was being paced when the fault ended."""
    for rate in ("8kbit", f"{int(lowest.removesuffix('kbit')) - 1}kbit"):
        with pytest.raises(UsageError, match=f"the lowest rate without real cables is {lowest}$"):
            job(rate, fabric, detect_s)
    assert job(lowest, fabric, detect_s).faults == (f"slow:1/0@step=2,rate={lowest}",)


def test_a_real_cable_may_have_any_rate() -> None:
    assert job("8kbit", emulated="bml").emulated == "bml"
