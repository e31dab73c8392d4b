"""What a rank sees of others that it cannot ask: a process that says nothing, ranks that all came again."""

import os
import queue
import signal
import socket
from pathlib import Path

import pytest
from file_store import FileStore

from bml.cluster.formation import coordinator_process
from bml.cluster.formation.coordinator_process import CoordinatorProcess
from bml.cluster.formation.entries import Entries, Joined
from bml.cluster.formation.group import form
from bml.cluster.formation.host import this_host
from bml.cluster.formation.secret import Secret
from bml.cluster.formation.settings import Settings, job_of
from bml.cluster.spec.job import Contact, JobSpec

DEADLINE_S = 30.0
SIZE, RANK = 3, 2


@pytest.mark.real
def test_a_process_for_coordinators_that_stops_before_its_first_word_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coordinator_process, "_STARTING_TURNS", 4)
    heard: queue.SimpleQueue[coordinator_process.Event] = queue.SimpleQueue()
    process = CoordinatorProcess()
    os.kill(process.number, signal.SIGSTOP)
    process.add("group", heard.put)
    assert heard.get(timeout=DEADLINE_S) == ("lost",)
    assert not Path(f"/proc/{process.number}").exists()
    process.close()


def at(rank: int, address: tuple[str, int], spec: JobSpec) -> Contact:
    return Contact(rank, address, (address,) * spec.parsed_fabric().levels)


@pytest.mark.real
def test_a_joiner_waits_for_ranks_that_were_all_started_again_after_it(tmp_path: Path) -> None:
    settings, here, store = Settings(transport="tcp"), this_host(None), FileStore(tmp_path)
    entries, spec = Entries(store, SIZE, 0.0), job_of(settings, [here] * SIZE)
    with socket.create_server(("127.0.0.1", 0)) as gone:
        old = gone.getsockname()
    for rank in range(SIZE):
        entries.came(rank, here)
        entries.put_contact(at(rank, old, spec))
    entries.put_job(spec, Secret(os.environ).mark(spec))
    with socket.create_server(("127.0.0.1", 0)) as newer:
        newer.settimeout(DEADLINE_S)
        group = form(store, RANK, SIZE, settings)
        try:
            entries.put_join(Joined(entries.next_incarnation(), at(0, newer.getsockname(), spec)))
            for _ in range(3):  # as often as it sees whether anybody is there
                newer.accept()[0].close()
            assert not group.server.is_over
        finally:
            group.close("crashed")
