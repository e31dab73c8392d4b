"""What `bml run` prints of the views at the end of a job, on wide and narrow terminals."""

from __future__ import annotations

from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from bml.cli.summary import summarise

_REASON = "server 4 is dead: its process was killed by signal 9; NIC 2/0 is silent towards 0 and 1"
_TIMES = {"noticed_s": 0.6217, "recover_s": 12.3456, "measured_s": 1.0271, "predicted_s": 1.0345}
_NONE = dict.fromkeys(_TIMES)
_VIEWS = [
    {
        "epoch": 1,
        "members": range(9),
        "commit": 0,
        "reason": "start",
        **_NONE,
        "noticed_s": 0.0,
        "recover_s": 0.433,
    },
    {"epoch": 2, "members": range(8), "commit": 12345, "reason": _REASON, **_TIMES},
]


def printed(width: int, *checkpoints: dict[str, Any] | None) -> str:
    """The end of a job of two views on a terminal of this width."""
    metrics = {server: {"checkpoints": each} for server, each in enumerate(checkpoints)}
    report = {"views": _VIEWS, "dead": {}, "left": {2: "it got SIGTERM"}, "steps": 9, "sizes": {}}
    result: Any = SimpleNamespace(
        report={**report, "samples": None, "nan": [], "digests": {0: ""}, "metrics": metrics}, value=None
    )
    file = StringIO()
    summarise(result, Console(file=file, width=width))
    return file.getvalue()


@pytest.mark.parametrize("width", [40, 80, 119])
def test_on_a_narrow_terminal_each_view_is_lines_and_nothing_is_cut(width: int) -> None:
    lines = printed(width).splitlines()
    assert lines[:4] == [
        "view 1: 9 servers, after step 0 (start)",
        "  first step after 433 ms",
        f"view 2: 8 servers, after step 12345 ({_REASON})",
        "  noticed in 622 ms, recovered in 12346 ms, a step 1027 ms, predicted 1034 ms",
    ]
    assert lines[4] == "server 2 left: it got SIGTERM"


@pytest.mark.parametrize("width", [120, 200])
def test_on_a_wide_one_they_are_a_table_with_whole_heads_and_numbers(width: int) -> None:
    text = printed(width)
    for whole in ("after step", "noticed in", "recovered in", "predicted", "12345", "12346 ms", "1034 ms"):
        assert whole in text
    assert "433 ms" not in text, "nothing recovered in the first view"
    assert "…" not in text


@pytest.mark.parametrize(
    ("checkpoints", "lines"),
    [
        ([None, None], []),
        ([{"whole": 30, "error": ""}, {"whole": 20, "error": ""}], []),
        ([{"whole": 0, "error": ""}] * 2, []),  # the last one, which nobody has settled, may be whole
        (
            [{"whole": 7, "error": ""}, {"whole": 9, "error": "the disk is full"}],
            ["the last checkpoint was not written: the disk is full"],
        ),
    ],
)
def test_a_checkpoint_that_was_not_written_is_said(checkpoints: list[Any], lines: list[str]) -> None:
    assert [line for line in printed(80, *checkpoints).splitlines() if "checkpoint" in line] == lines
