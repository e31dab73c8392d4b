"""The launcher's part of the flight recorder: what it keeps, where it writes, and what it says of errors."""

from __future__ import annotations

import importlib.metadata
import os
import struct
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

import bml
from bml.cli.recordings.kept import keep_recording
from bml.cluster.launcher.recorder import Recorder, file_to_write, write
from bml.cluster.launcher.result import Result
from bml.cluster.process.pickling import pack
from bml.cluster.process.training import run_training
from bml.cluster.server.assembly import Assembly
from bml.cluster.server.server import Server
from bml.cluster.spec.job import JobSpec
from bml.cluster.spec.leaving import LEFT
from bml.errors import FabricError, TrainingError, UsageError

SPEC = JobSpec("bcube:2x2")


def part(server: int, incarnation: int) -> bytes:
    """A packed part, as far as a launcher reads it."""
    return struct.pack(">IIQ", server, incarnation, 4) + b"rest"


def recorder_of(path: Path | None, answers: dict[int, dict[str, Any]] | None = None) -> Recorder:
    return Recorder(SPEC, lambda request, patience: answers or {}, path)


def test_a_job_of_a_bml_that_is_only_on_the_path_ends_well(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", not_installed)
    known = recorder_of(None)
    assert known.data == b""
    known.add(part(1, 0))
    assert b"unknown" in known.data


def test_the_newest_two_incarnations_of_a_server_stay() -> None:
    known = recorder_of(None)
    for incarnation in (0, 2, 5, 3):
        known.add(part(1, incarnation))
    known.add(part(2, 0))
    known.add(b"")
    assert [*known._parts] == [(1, 5), (1, 3), (2, 0)]


def test_files_that_two_threads_write_at_once_are_whole(tmp_path: Path) -> None:
    file, failed = tmp_path / "job.bmlrec", []
    whole = [bytes([each]) * 200_000 for each in range(4)]

    def writes(data: bytes) -> None:
        try:
            for _ in range(50):
                write(file, data)
                assert file.read_bytes() in whole
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=writes, args=(data,)) for data in whole]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert failed == []
    assert [*tmp_path.iterdir()] == [file]


@pytest.mark.parametrize("gone", ["removed", "file"])
def test_a_folder_that_has_gone_is_told_at_the_end(tmp_path: Path, gone: str) -> None:
    folder = tmp_path / "there"
    known = recorder_of(folder / "job.bmlrec")
    known.add(part(0, 0))
    if gone == "file":
        folder.write_text("in its place")
    known.close()
    assert known.lost.startswith(f"the recording cannot be written to {folder / 'job.bmlrec'}: No")
    folder.unlink(missing_ok=True)
    folder.mkdir()
    known = recorder_of(folder / "job.bmlrec")
    known.add(part(0, 0))
    known.close()
    assert known.lost == ""
    assert (folder / "job.bmlrec").read_bytes() == known.data


def test_no_recording_at_all_is_told_at_the_end(tmp_path: Path) -> None:
    known = recorder_of(tmp_path / "job.bmlrec")
    known.close()
    assert known.lost == f"no server has brought a recording for {tmp_path / 'job.bmlrec'}"


def test_a_dump_names_the_servers_that_gave_something(tmp_path: Path) -> None:
    answers = {1: {"recording": b""}, 0: {"recording": part(0, 0)}}
    assert recorder_of(tmp_path / "job.bmlrec", answers).dump("asked for")["servers"] == [0]
    with pytest.raises(FabricError, match="no server has answered with its recording"):
        recorder_of(tmp_path / "job.bmlrec", {1: {"recording": b""}}).dump("asked for")


def test_a_failed_job_whose_file_is_lost_has_one_in_the_users_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    result = Result(SPEC, recording=b"held", recording_lost="no space")
    assert keep_recording(result, None, tmp_path / "x") == ""
    said = keep_recording(result, TrainingError("it raised", 1), tmp_path / "x")
    (file,) = (tmp_path / "bml").iterdir()
    assert str(file) in said
    assert file.read_bytes() == b"held"


def test_only_plain_files_are_replaced(tmp_path: Path) -> None:
    pipe, link, loop = tmp_path / "pipe", tmp_path / "link", tmp_path / "loop"
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    for odd in (pipe, tmp_path, loop, Path("/dev/null")):
        with pytest.raises(UsageError, match=f"no recording can be written to {odd}: .*name a file"):
            bml.start(print, "bcube:2x2", launcher="processes", record=odd)
        with pytest.raises(UsageError, match="no recording can be written"):
            recorder_of(None, {0: {"recording": part(0, 0)}}).dump("asked for", odd)
    link.symlink_to(tmp_path / "job.bmlrec")
    for _ in range(2):
        write(file_to_write(link), b"held")
        assert link.is_symlink()
        assert (tmp_path / "job.bmlrec").read_bytes() == b"held"


@pytest.mark.parametrize("when", ["taken", "packed"])
def test_a_recording_that_fails_is_empty(when: str, caplog: pytest.LogCaptureFixture) -> None:
    def fails(*_: object) -> Any:
        raise MemoryError("no room")

    def taken(why: str) -> Any:
        return fails if when == "packed" else fails()

    shell: Any = SimpleNamespace(core=SimpleNamespace(server=3), _taken=taken)
    assert Assembly.take_recording(shell, "end")() == b""
    assert [each.message for each in caplog.records] == ["server 3 has no recording: MemoryError: no room"]


@pytest.mark.parametrize(
    ("leaves", "asked", "brings"), [(True, False, b""), (True, True, b"held"), (False, False, b"held")]
)
def test_servers_that_leave_on_notice_bring_no_recording_unasked(
    leaves: bool, asked: bool, brings: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: None)
    server: Any = MagicMock()
    server.server, server.joins, server.leaves, server.commit_at_s = 0, False, leaves, []
    server.wait_for_view.side_effect = server.error = TrainingError("the job is over", 1)
    server._spec.record = asked
    server._shell.take_recording.return_value = lambda: b"held"
    server.recording = lambda wanted: Server.recording(server, wanted)
    report = run_training(server, {}, pack(print))
    assert (report.kind == LEFT, report.recording) == (leaves, brings)
