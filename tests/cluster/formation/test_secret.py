"""What a process can do that reads the store of a group, and does not have the group's secret."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
from file_store import FileStore
from ranks import Ranks
from test_starting import HERE, RANK, SIZE, begun, held

from bml.cluster.formation.entries import Entries
from bml.cluster.formation.group import form
from bml.cluster.formation.secret import SECRET, Secret
from bml.cluster.formation.settings import Settings, job_of
from bml.cluster.spec.job import JobSpec
from bml.errors import StartError, UsageError
from bml.io.poller import Poller
from bml.transport.handshake import control
from bml.transport.handshake.auth import Identity

GUESS, TEXT = "0123456789abcdef", "fedcba9876543210"
DEADLINE_S = 40.0


def secret(text: str) -> Secret:
    return Secret({SECRET: text})


def test_only_the_secret_makes_its_token_and_its_mark() -> None:
    spec = job_of(Settings(), [HERE] * SIZE, {})
    texts = ["", GUESS, TEXT]
    assert len({secret(text).mixed_into(spec).token for text in texts}) == 3
    assert secret("").mixed_into(spec) == spec
    assert secret(TEXT).mixed_into(spec) == secret(TEXT).mixed_into(spec)
    assert len({secret(text).mark(spec) for text in texts}) == 3
    assert secret(TEXT).mark(spec) != secret(TEXT).mixed_into(spec).token, "the mark is for all to see"


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(UsageError, match=f"{SECRET} has 15 characters: give 16 or more"):
        secret(TEXT[:15])


@pytest.mark.parametrize(
    ("ours", "others", "says"),
    [
        ("", TEXT, f"rank 0 has a {SECRET} and this rank has none: set the same"),
        (TEXT, "", f"this rank has a {SECRET} and rank 0 has none: set the same"),
        (TEXT, GUESS, f"the {SECRET} of this rank is not that of rank 0: set the same"),
    ],
)
def test_ranks_that_have_not_the_same_secret_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ours: str, others: str, says: str
) -> None:
    monkeypatch.setenv(SECRET, ours)
    begun(FileStore(tmp_path), Settings(), others)
    before = held()
    with pytest.raises(UsageError, match=says):
        form(FileStore(tmp_path), RANK, SIZE)
    assert held() == before


def test_a_job_that_a_stranger_put_into_the_store_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stranger knows that job's token, and the mark of another job of ours."""
    monkeypatch.setenv(SECRET, TEXT)
    entries = Entries(FileStore(tmp_path), 1, 0.0)
    entries.put_job(job_of(Settings(), [HERE], {}), secret(TEXT).mark(job_of(Settings(), [HERE], {})))
    with pytest.raises(UsageError, match="is not that of rank 0"):
        form(FileStore(tmp_path), 0, 1)


def test_a_job_that_a_stranger_has_changed_in_the_store_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name and token, and the mark, are those of rank 0."""
    monkeypatch.setenv(SECRET, TEXT)
    entries = begun(FileStore(tmp_path), Settings(), TEXT)
    ours, mark = entries.job(), entries.mark()
    assert secret(TEXT).mark(ours) == mark, "what has passed the store is what rank 0 has made"
    for changed in (replace(ours, min_servers=2), replace(ours, faults=("kill:1@step=5",))):
        entries.put_job(changed, mark)
        with pytest.raises(UsageError, match="is not that of rank 0"):
            form(FileStore(tmp_path), RANK, SIZE)


def test_what_is_no_mark_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, TEXT)
    begun(FileStore(tmp_path), Settings())
    FileStore(tmp_path).set("bml/secret", "no mark")
    with pytest.raises(UsageError, match="bml/secret in the store of this group is 'no mark'"):
        form(FileStore(tmp_path), RANK, SIZE)


def test_without_a_secret_the_store_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET, raising=False)
    begun(FileStore(tmp_path), Settings())
    with pytest.raises(StartError, match="ranks 0, 1 appeared, but could not start in time"):
        form(FileStore(tmp_path), RANK, SIZE, Settings(start_s=0.1))


def is_believed(spec: JobSpec, address: tuple[str, int], server: int) -> bool:
    """Whether a server takes the maker of this call for its coordinator."""
    poller, ends = Poller(), list[bool]()

    def opened(channel: control.Channel) -> None:
        ends.append(True)
        channel.close()

    control.dial(
        *address,
        identity=Identity.of(spec.token, spec.job, control.COORDINATOR),
        poller=poller,
        on_open=opened,
        on_fail=lambda end: ends.append(False),
        expect_server=server,
    )
    until_s = time.monotonic() + DEADLINE_S
    while not ends:
        assert time.monotonic() < until_s
        poller.poll(0.1)
    poller.close()
    return ends[0]


@pytest.mark.real
def test_the_token_in_the_store_opens_no_rank_that_has_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET, TEXT)
    with Ranks(tmp_path, 3, endless=True) as ranks:
        ranks.start()
        ranks.wait_for("step", n=5)
        entries = Entries(FileStore(tmp_path), 3, 0.0)
        read = entries.job()
        for rank, contact in entries.contacts().items():
            assert not is_believed(read, contact.control, rank)
            assert not is_believed(secret(GUESS).mixed_into(read), contact.control, rank)
            assert is_believed(secret(TEXT).mixed_into(read), contact.control, rank), "so the call is right"
        ranks.processes[1].kill()
        ranks.end(1)
        ranks.start(1)
        ranks.stop_when_by(0, 1, 2)
        for rank in range(3):
            status, text = ranks.end(rank)
            assert status == 0
            assert all("wrong token" in line for line in text.splitlines())
        ranks.check_sums()
        ranks.check_nothing_left()
