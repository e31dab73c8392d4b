"""A training function on its way to the servers."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from bml.cluster.process.pickling import pack, unpack


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """This one, which is launcher and server in turn."""
    monkeypatch.setattr(sys, "argv", ["train.py", "4"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    return monkeypatch


def test_a_server_finds_its_launchers_arguments(process: pytest.MonkeyPatch) -> None:
    """Those of a server's own process are descriptors, or Ray's."""
    sent = pack(lambda session: sys.argv[1])
    process.setattr(sys, "argv", ["-c", "17", "18"])
    train: Any = unpack(sent)
    assert train(None) == "4"
    assert sys.argv == ["train.py", "4"]


def test_a_traceback_names_the_users_file_and_line(process: pytest.MonkeyPatch) -> None:
    def train(session: Any) -> None:
        def inner() -> None:
            raise ValueError("mine")

        inner()

    unpacked: Any = unpack(pack(train))
    try:
        unpacked(None)
    except ValueError:
        shown = traceback.format_exc()
    assert shown.count(f'File "{__file__}", line ') == 3
    assert 'raise ValueError("mine")' in shown
    assert "dynamic" not in shown


def test_a_server_finds_what_its_launcher_can_import_behind_what_it_finds_itself(
    process: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "beside_the_script.py").write_text("VALUE = 7\n")

    def train(session: Any) -> int:
        import beside_the_script  # type: ignore[import-not-found]

        return int(beside_the_script.VALUE)

    before = list(sys.path)
    process.chdir(tmp_path)
    sys.path.append("")
    sent = pack(train)
    process.setattr(sys, "path", before)
    unpacked: Any = unpack(sent)
    assert sys.path[: len(before)] == before
    assert unpacked(None) == 7


def test_a_working_folder_that_was_removed_is_no_obstacle(
    process: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    process.chdir(gone)
    process.setattr(sys, "path", ["", *sys.path])
    gone.rmdir()
    train: Any = unpack(pack(lambda session: 5))
    assert train(None) == 5
    assert "" not in sys.path[1:]
