"""A rank that cannot start, in this process: what it says, and that it keeps nothing."""

import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from descriptors import opened
from file_store import FileStore

import bml
from bml.cluster.formation import program_end
from bml.cluster.formation.entries import Entries
from bml.cluster.formation.group import form
from bml.cluster.formation.host import this_host
from bml.cluster.formation.secret import SECRET, Secret
from bml.cluster.formation.settings import Settings, job_of
from bml.cluster.spec.job import Contact
from bml.errors import FabricError, StartError, UsageError
from bml.io.interruptible import refuse_green_threads

SIZE, RANK = 3, 2
HERE = this_host(None)


def begun(store: FileStore, settings: Settings, secret: str = "") -> Entries:
    """The entries of a group of which the others have appeared, and rank 0 has made the job."""
    entries = Entries(store, SIZE, 0.0)
    for rank in range(SIZE):
        entries.came(rank, HERE)
    spec = job_of(settings, [HERE] * SIZE)
    entries.put_job(spec, Secret({SECRET: secret}).mark(spec))
    return entries


def held() -> set[object]:
    """What this process holds: descriptors, shared memory, threads."""
    threads = {thread.name for thread in threading.enumerate()}
    return {*opened(), *(name for name in os.listdir("/dev/shm") if "bml" in name), *threads}


@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_a_rank_whose_partners_cannot_start_keeps_nothing(tmp_path: Path, transport: str) -> None:
    (tmp_path / "before").mkdir()
    settings = Settings(start_s=0.2, transport=transport)
    for folder in (tmp_path / "before", tmp_path):  # the first one opens what a process keeps
        begun(FileStore(folder), settings)
        before = held()
        with pytest.raises(StartError, match="ranks 0, 1 appeared, but could not start in time"):
            form(FileStore(folder), RANK, SIZE, settings)
    assert held() == before


def test_a_rank_whose_partners_use_another_transport_keeps_nothing(tmp_path: Path) -> None:
    settings = Settings(start_s=5.0, transport="tcp")
    entries = begun(FileStore(tmp_path), settings)
    for rank in (0, 1):
        nics = (("127.0.0.1", 9),)
        entries.put_contact(Contact(rank, ("127.0.0.1", 9), nics, transport="verbs"))
    before = held()
    with pytest.raises(FabricError, match="different transports"):
        form(FileStore(tmp_path), RANK, SIZE, settings)
    assert held() == before


def test_whether_ranks_are_let_in_again_is_the_groups_and_not_a_ranks(tmp_path: Path) -> None:
    entries = begun(FileStore(tmp_path), Settings(rejoin=False))
    for rank in range(SIZE):
        entries.put_contact(Contact(rank, ("127.0.0.1", 9), (("127.0.0.1", 9),)))
    with pytest.raises(StartError, match=r"rank 2 was in this group before.*rejoin=False"):
        form(FileStore(tmp_path), RANK, SIZE, Settings(rejoin=True))


@pytest.mark.parametrize(
    ("status", "failed"),
    [((), False), ((None,), False), ((0,), False), ((1,), True), (("it gave up",), True)],
)
def test_how_a_program_ends_is_known_at_the_end_of_its_process(
    status: tuple[object, ...], failed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_python(status: object = None) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(sys, "exit", of_python)  # other tests in this process have it watched already
    monkeypatch.setattr(program_end, "_watches", False)
    monkeypatch.setattr(program_end, "_failed", False)
    program_end.watch()
    ours = sys.exit
    monkeypatch.setattr(sys, "exit", lambda *given: ours(*given))  # a library that wraps it, too
    program_end.watch()

    def ends_itself_alone() -> None:
        with suppress(SystemExit):
            sys.exit(1)

    other = threading.Thread(target=ends_itself_alone)
    other.start()
    other.join(20)
    with pytest.raises(SystemExit) as raised:
        sys.exit(*status)
    assert raised.value.code == (status[0] if status else None)
    assert program_end.is_failure(raised.value) == program_end.has_failed() == failed
    assert program_end.is_failure(KeyboardInterrupt())
    assert not program_end.is_failure(None)


@pytest.mark.parametrize(
    ("library", "module", "replaced"),
    [("gevent", "gevent.monkey", "saved"), ("eventlet", "eventlet.patcher", "already_patched")],
)
def test_nothing_begins_where_threads_are_not_those_of_python(
    library: str, module: str, replaced: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job ended with an AttributeError, or waited for ever for a thread."""
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{replaced: {}}))
    refuse_green_threads()  # it is imported, and has replaced nothing
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{replaced: {"threading": {}}}))
    with pytest.raises(UsageError, match=f"{library} has replaced threading of Python"):
        bml.start(print, "bcube:2x2", launcher="processes")
    with pytest.raises(UsageError, match="start the job from a program that lets"):
        form(FileStore(tmp_path), 0, 1)
