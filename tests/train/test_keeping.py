"""Checkpoints without processes: the files, torn and damaged ones, which are removed, and what is refused."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from files_in_memory import Memory

from bml.errors import UsageError
from bml.sim.programs.faults import Dead, Faults
from bml.sim.programs.running import run
from bml.train.keeping import writer as writing
from bml.train.keeping.files import Folder
from bml.train.keeping.owner import owner
from bml.train.keeping.parts import UNFINISHED, Key, by_key, superseded
from bml.train.keeping.resuming import Resumed, check_lineage, newest_whole, read
from bml.train.keeping.settings import Keeping
from bml.train.keeping.writer import Writer
from bml.train.snapshot import Snapshot, snapshot
from bml.train.state import NamedState

JOB = "bml-1"


def made(fill: float = 1.0, n: int = 100) -> Snapshot:
    state, w = NamedState(), np.full(n, fill)
    state.name({"w": w})
    return snapshot(state, (), (0, 1), b"")


def written(files: Any, steps: int, n_parts: int = 3, job: str = JOB, fill: float = 1.0) -> Key:
    key = Key(steps, job, n_parts)
    for part in range(n_parts):
        writer = Writer(files, part, keep=3)
        writer.begin(key, part, made(fill))
        writer.wait()
        assert not writer.error
    return key


def test_a_checkpoint_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path / "new" / "folder"))
    written(folder, 100)
    key = written(folder, 200, n_parts=7, fill=2.0)
    assert newest_whole(folder) == key
    snapshot = made(2.0)
    assert bytes(read(folder, key)) == bytes(snapshot[0 : len(snapshot)])


def test_more_parts_than_bytes() -> None:
    files: dict[str, bytes] = {}
    memory = Memory(files)
    state = made(n=0)
    key = Key(1, JOB, 2 * len(state))
    for part in range(key.n_parts):
        Writer(memory, 0, 3)._write(
            key,
            part,
            len(state),
            b"",
            0,
            memoryview(bytes(state[0 : len(state)])[part // 2 : (part + 1) // 2]),
        )
    assert bytes(read(memory, key)) == bytes(state[0 : len(state)])


def test_every_damaged_bit_and_every_torn_part_is_found() -> None:
    files: dict[str, bytes] = {}
    older, key = written(Memory(files), 100), written(Memory(files), 200, fill=2.0)
    whole = dict(files)
    chance = random.Random(0)
    name = key.file(1)
    n = len(whole[name])
    damages: list[Callable[[bytes], bytes]] = [
        lambda b, i=i: b[:i] + bytes([b[i] ^ (1 << i % 8)]) + b[i + 1 :] for i in range(n)
    ]  # type: ignore[misc]
    damages += [lambda b, i=i: b[:i] for i in chance.sample(range(n), 40)]  # type: ignore[misc]
    damages += [
        lambda b: b + b"\x00",
        lambda b: b"",
        lambda b: whole[key.file(2)],
        lambda b: whole[older.file(1)],
    ]
    for damage in damages:
        files[name] = damage(whole[name])
        assert newest_whole(Memory(files)) == older
    del files[name]
    assert newest_whole(Memory(files)) == older
    with pytest.raises(UsageError, match=r"part 1 of 3 is missing.*every server must see the whole folder"):
        read(Memory(files), key)


def test_a_job_says_with_what_it_goes_on_and_why_not_with_the_newest(tmp_path: Path) -> None:
    kept = Folder(str(tmp_path))
    older, key = written(kept, 100), written(kept, 200)
    going = Keeping.of(tmp_path, 10, 3, tmp_path)
    assert str(going) == "going on from the checkpoint after step 200 of the job bml-1"
    assert going.left() == f"{key} is kept: go on with --resume {tmp_path}"
    file = tmp_path / key.file(1)
    file.write_bytes(file.read_bytes()[:-1])
    said = str(Keeping.of(tmp_path, 10, 3, tmp_path))
    assert said.startswith(f"going on from {older}; not whole: {key}: part 1 of 3 is damaged: ")
    file.unlink()
    assert str(Keeping.of(None, 10, 3, tmp_path)).endswith(f"{key}: part 1 of 3 is missing")
    assert Keeping.of(tmp_path, 10, 3, tmp_path).left().startswith(str(older))
    assert Keeping.of(None, 10, 3, tmp_path).left() == ""
    assert Keeping(str(tmp_path / "nothing")).left() == ""


def test_parts_of_different_states_are_no_checkpoint() -> None:
    files: dict[str, bytes] = {}
    key = Key(100, JOB, 2)
    for part in range(2):
        state, w = NamedState(), np.zeros(4)
        state.name({"w": w})
        writer = Writer(Memory(files), part, 3)
        writer.begin(key, part, snapshot(state, (), (part,), b""))
        writer.wait()
    with pytest.raises(UsageError, match="the servers that wrote it had different states"):
        newest_whole(Memory(files))


def test_a_folder_without_a_whole_checkpoint_says_why(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no checkpoint in .*begin without --resume"):
        newest_whole(Folder(str(tmp_path / "nothing")))
    (tmp_path / "notes.txt").write_text("no checkpoint")
    (tmp_path / "000000000100-x-0000-of-0000.bmlpart").write_bytes(b"")
    with pytest.raises(UsageError, match=r"no checkpoint in .*begin without --resume"):
        newest_whole(Folder(str(tmp_path)))
    key = written(Folder(str(tmp_path)), 100)
    (tmp_path / key.file(0)).write_bytes(b"no part")
    with pytest.raises(
        UsageError, match="after step 100 of the job bml-1: part 0 of 3 is damaged: it does not begin"
    ):
        newest_whole(Folder(str(tmp_path)))


def files_of(*keys: Key, without: tuple[Key, ...] = ()) -> list[str]:
    return [key.file(part) for key in keys for part in range(key.n_parts) if part or key not in without]


def keys_left(names: list[str], *given: Any, dropped: tuple[Key, ...] = ()) -> set[Key]:
    job, base, known, keep = given
    gone = superseded(names, job, base, known, dropped, keep)
    return set(by_key(set(names) - set(gone)))


def test_the_newest_whole_checkpoints_stay() -> None:
    one, two, torn, three, new = (Key(steps, JOB, 2) for steps in (1, 2, 3, 4, 5))
    names = files_of(one, two, torn, three, new, without=(torn, new))
    known = [one, two, three]
    assert keys_left(names, JOB, 0, known, 2) == {two, torn, three, new}
    assert keys_left(names, JOB, 0, known, 1) == {three, new}
    assert keys_left(names, JOB, 0, known, 3) == {one, two, torn, three, new}
    assert keys_left(names, JOB, 0, known, 9) == {one, two, torn, three, new}, "fewer than 9 are whole"


def test_one_that_has_all_parts_does_not_count_until_the_servers_have_agreed() -> None:
    one, two, alone = Key(1, JOB, 2), Key(2, JOB, 2), Key(3, JOB, 1)
    assert keys_left(files_of(one, two), JOB, 0, [one], 1) == {one, two}
    assert keys_left(files_of(one, two), JOB, 0, [one], 1, dropped=(two,)) == {one}
    assert keys_left(files_of(one, two, alone), JOB, 0, [one], 1) == {alone}, "a server left, and wrote it"


class Small(Memory):
    """A disk that has room for so many checkpoints."""

    room = 2

    def write(self, name: str, pieces: Iterable[bytes | memoryview], unfinished: str = "") -> None:
        self.error = None if len(by_key([*self.files, name])) <= self.room else OSError(errno.ENOSPC, "full")
        super().write(name, pieces, unfinished)


def test_a_disk_that_holds_just_as_many_as_stay_always_gets_the_newest() -> None:
    """As many stay as was asked for, of which the servers have not agreed on the newest yet."""
    disk, made_at = Small({}), (10, 20, 30, 40, 50)
    writer = Writer(disk, 0, keep=2)
    for key in (Key(steps, JOB, 2) for steps in made_at):
        for part in range(2):
            writer.begin(key, part, made())
            writer.wait()
        writer.whole = [*writer.whole, key][-2:]
        assert writer.error == ""
    assert [key.steps for key in sorted(by_key(disk.names()))] == [40, 50]


class Torn(Memory):
    """A store that shows an object before it is whole."""

    names_are_whole = False

    def tear(self, key: Key, job: str) -> None:
        """What a server that is killed within a write leaves."""
        Writer(self, 0, 9).write(key, made())
        self.files[key.file(0)] = self.files[key.file(0)][:-5]


def test_a_torn_checkpoint_of_one_part_replaces_no_older_one() -> None:
    store = Torn({})
    older = written(store, 100)
    store.tear(alone := Key(150, JOB, 1), JOB)
    writer, new = Writer(store, 0, keep=1), Key(200, JOB, 3)
    writer.whole = [older]
    writer.begin(new, 0, made())
    writer.wait()
    assert set(by_key(store.names())) == {older, alone, new}
    assert newest_whole(store) == older
    store.files.pop(alone.file(0))
    writer.write(alone, made())
    writer.begin(new, 0, made())
    writer.wait()
    assert set(by_key(store.names())) == {alone, new}, "it is whole now"


def test_a_torn_checkpoint_of_another_leaver_is_written_again() -> None:
    store = Torn({})
    store.tear(key := Key(150, JOB, 1), JOB)
    Writer(store, 1, keep=1).write(key, made())
    assert newest_whole(store) == key
    whole = dict(store.files)
    store.error = OSError("a second writer must not write what is whole")
    writer = Writer(store, 2, keep=1)
    writer.write(key, made())
    assert (writer.error, store.files) == ("", whole)


def test_what_was_dropped_goes_and_what_a_dead_server_has_not_finished() -> None:
    one, two, three, new = (Key(steps, JOB, 2) for steps in (1, 2, 3, 4))
    names = files_of(one, two, three, new, without=(new,))
    assert keys_left(names, JOB, 0, [one], 1, dropped=(two, three)) == {one, new}
    assert keys_left(names, JOB, 0, [one, three], 2, dropped=(two,)) == {one, three, new}
    own = f"{two.file(1)}.1{UNFINISHED}"
    assert own in superseded([*names, own], JOB, 0, [three], [], 1)
    assert own not in superseded([*names, own], JOB, 0, [one, three], [], 2)


def test_parts_on_several_machines_are_whole_if_the_servers_have_agreed() -> None:
    one, two, three = (Key(steps, JOB, 2) for steps in (1, 2, 3))
    here = [key.file(0) for key in (one, two, three)]
    assert keys_left(here, JOB, 0, [], 1) == {one, two, three}
    assert keys_left(here, JOB, 0, [one, two], 1) == {two, three}


def test_a_job_that_goes_on_keeps_its_ancestors_and_removes_what_was_not_whole() -> None:
    older, base, damaged = (Key(steps, "before", 2) for steps in (1, 2, 9))
    left = f"{Key(9, 'before', 2).file(1)}.1{UNFINISHED}"
    own = f"{Key(5, JOB, 2).file(1)}.1{UNFINISHED}"
    names = [*files_of(older, base, damaged), left, own, "notes.txt"]
    assert superseded(names, JOB, 2, [base], [], 3) == [], "the damaged one does not count"
    mine, torn = Key(4, JOB, 2), Key(5, JOB, 2)
    names += files_of(mine, torn, without=(torn,))
    assert superseded(names, JOB, 2, [base], [], 1) == [*files_of(older), left], "its own are not whole yet"
    gone = superseded(names, JOB, 2, [base, mine], [], 1)
    assert set(gone) == {*files_of(older, base, damaged), left}


def test_what_cannot_be_written_is_told_once_and_leaves_the_older_ones() -> None:
    files: dict[str, bytes] = {}
    disk = Memory(files)
    writer = Writer(disk, 0, 3)
    writer.write(Key(1, JOB, 1), made())
    disk.error = OSError(errno.ENOSPC, "No space left on device")
    for steps in (2, 3):
        writer.write(Key(steps, JOB, 1), made())
    assert "No space left on device" in writer.news()
    assert not writer.news()
    assert writer.shown()["written"] == 1
    assert "No space left" in writer.shown()["error"]
    assert list(files) == [Key(1, JOB, 1).file(0)]
    disk.error = None
    writer.write(Key(4, JOB, 1), made())
    assert writer.shown()["error"] == ""
    assert newest_whole(disk).steps == 4


def test_a_job_that_came_later_owns_the_folder() -> None:
    files = Memory({})
    older, later = Writer(files, 0, 1), Writer(files, 0, 1)
    older.claim("zzz")
    older.write(Key(10, "zzz", 1), made())
    later.base = 10
    later.claim("aaa")
    older.write(Key(20, "zzz", 1), made())
    assert "the job aaa has begun to write checkpoints to the same folder" in older.news()
    assert set(by_key(files.names())) == {Key(10, "zzz", 1)}
    later.write(Key(12, "aaa", 1), made())
    later.write(Key(14, "aaa", 1), made())
    assert set(by_key(files.names())) == {Key(12, "aaa", 1), Key(14, "aaa", 1)}
    older.claim("zzz")
    assert owner(files.names()) == "zzz", "a job that begins again is the last one"


def test_a_folder_that_could_not_be_claimed_is_claimed_later() -> None:
    files = Memory({}, OSError(errno.EROFS, "Read-only file system"))
    writer = Writer(files, 0, 1)
    with pytest.raises(OSError, match="Read-only"):
        writer.claim(JOB)
    files.files.clear()
    files.error = None
    writer.write(Key(1, JOB, 1), made())
    assert owner(files.names()) == JOB
    assert not writer.error


def test_what_cannot_be_removed_keeps_no_new_one_from_being_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Memory, name: str) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    files = Memory({})
    writer = Writer(files, 0, 1)
    for steps in (1, 2, 3):
        writer.write(Key(steps, JOB, 1), made())
        monkeypatch.setattr(Memory, "remove", refuse)
    assert newest_whole(files).steps == 3
    assert "of an older checkpoint cannot be removed" in writer.news()


def test_a_disk_that_hangs_does_not_hold_the_end_of_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(Memory, "names", lambda self: goes_on.wait(30) and [])
    monkeypatch.setattr(writing, "_CLOSING_S", 0.05)
    writer = Writer(Memory({}), 0, 1)
    writer.begin(Key(1, JOB, 1), 0, made())
    writer.close()
    assert "the last part was not written" in writer.shown()["error"]
    goes_on.set()


def test_an_error_that_is_none_of_the_disk_does_not_end_the_thread() -> None:
    disk = Memory({}, ValueError("of the user"))  # type: ignore[arg-type]
    writer = Writer(disk, 0, 3)
    writer.write(Key(1, JOB, 1), made())
    assert "could not write its part: ValueError('of the user')" in writer.news()
    disk.error = None
    writer.write(Key(2, JOB, 1), made())
    writer.close()
    assert newest_whole(disk).steps == 2


def test_memory_that_is_made_before_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    writer, state = Writer(memory := Memory({}), 0, 3), made(n=300_000)
    writer.prepare(len(state))
    writer.wait()
    monkeypatch.setattr(Writer, "_make_memory", None)
    writer.write(Key(1, JOB, 1), state)
    assert bytes(read(memory, Key(1, JOB, 1))) == bytes(state[0 : len(state)])


def test_no_memory_for_a_copy_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> None:
        raise MemoryError

    writer = Writer(Memory({}), 3, 3)
    monkeypatch.setattr(Writer, "_make_memory", no_memory)
    writer.write(Key(1, JOB, 1), made())
    assert "server 3 has no memory for a copy of" in writer.news()


def test_a_state_that_cannot_be_given_is_no_checkpoint() -> None:
    state = NamedState()
    state.name({"w": np.zeros(3)})  # nothing else holds the array
    writer = Writer(Memory({}), 0, 3)
    writer.write(Key(1, JOB, 1), snapshot(state, (), (0,), b""))
    assert "no longer uses an array of the state 'w'" in writer.shown()["error"]


def test_a_folder_of_another_job_is_refused(tmp_path: Path) -> None:
    key = written(Folder(str(tmp_path)), 100)
    with pytest.raises(
        UsageError, match="has checkpoints of another job, bml-1: go on from them with --resume"
    ):
        Keeping.of(tmp_path, 1, 1, None)
    check_lineage(Folder(str(tmp_path)), "another", key)
    assert Keeping.of(tmp_path, 1, 1, tmp_path).resumed == key
    for wrong in ({"every": 0}, {"every": 1.5}, {"keep": True}, {"keep": 0}):
        with pytest.raises(UsageError, match=f"{next(iter(wrong))} is .*at least 1"):
            Keeping.of(tmp_path / "new", **{"every": 1, "keep": 1, "resume": None, **wrong})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="give a folder"):
        Keeping.of("", 1, 1, None)


def test_one_command_begins_a_training_and_goes_on_with_it(tmp_path: Path) -> None:
    def of(every: int = 100) -> Keeping:
        return Keeping.of(tmp_path / "kept", every, 3, tmp_path / "kept")

    folder = Folder(str(tmp_path / "kept"))
    assert (of().resumed, of().source) == (None, "")
    folder.write(Key(100, JOB, 2).file(0), [b"died while it wrote its first checkpoint"])
    with pytest.raises(UsageError, match="part 0 of 2 is damaged"):
        of(every=49)  # too many steps would be lost: its other parts may be elsewhere
    assert (of(every=50).resumed, of().source, folder.names()) == (None, "", [])
    key = written(folder, 100)
    assert of().resumed == key
    assert str(of()) == "going on from the checkpoint after step 100 of the job bml-1"
    (tmp_path / "kept" / key.file(1)).write_bytes(b"damaged")
    with pytest.raises(UsageError, match="part 1 of 3 is damaged"):
        of()


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("no folder")
    for folders in ((tmp_path / "kept", None), (None, tmp_path / "kept")):
        with pytest.raises(UsageError, match=r"checkpoints cannot be read in .*kept: Not a directory"):
            Keeping.of(folders[0], 1, 1, folders[1])


# --- programs ------------------------------------------------------------------------------------


def train(n: int = 4, loops: tuple[int, ...] = (6,), global_batch: int = 12) -> Callable[[Any], Any]:
    def function(session: Any) -> Any:
        w = np.zeros(n)
        session.state(params=w)
        for length in loops:
            for batch in session.batches(12 * length, global_batch=global_batch, epochs=1):
                share = float(batch.indices.sum())
                w += batch.allreduce(np.full(n, share), recompute=lambda i: np.full(n, float(i.sum())))
        return w.copy(), session.samples()["complete"]

    return function


def ends_of(
    function: Callable[[Any], Any],
    memory: Memory,
    job: str,
    resumed: Key | None = None,
    faults: Faults | None = None,
    n_servers: int = 3,
    every: int = 1,
) -> dict[int, Any]:
    """What each server returned or raised."""
    found: dict[int, Any] = {}

    def note(communicator: Any, session: Any, value: Any, error: BaseException | None) -> None:
        if not isinstance(error, Dead):
            found[communicator.server] = value if error is None else error

    def begin(session: Any) -> None:
        if resumed is not None:
            session.resume(Resumed(resumed, read(memory, resumed)))
        session.checkpoint(memory, every=every, keep=1)

    group = run(function, range(n_servers), faults or Faults(), note, begin, job)
    assert not group.violations
    return found


@pytest.fixture
def kept() -> tuple[Memory, Key]:
    """The checkpoint of a job that died in its fourth step."""
    memory = Memory({})
    ends_of(train(), memory, "first", faults=Faults(ends_after=7))
    return memory, newest_whole(memory)


@pytest.mark.parametrize("n_servers", [2, 3, 5])
def test_another_number_of_servers_goes_on(kept: tuple[Memory, Key], n_servers: int) -> None:
    memory, key = kept
    for value, complete in ends_of(train(), memory, "second", key, n_servers=n_servers).values():
        assert complete
        assert (value == sum(range(72)) / 12).all()
    assert "second" in {each.job for each in by_key(memory.names())}


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (train(n=5), r"begins with the state \[\('params', '<f8', \(5,\)\)\], the checkpoint has"),
        (
            train(global_batch=6),
            "comes to the loop batches.*global_batch=6.*the checkpoint is in batches.*global_batch=12",
        ),
        (lambda session: None, "did not come to where the checkpoint is: iteration"),
    ],
)
def test_another_program_is_told_so(kept: tuple[Memory, Key], other: Any, says: str) -> None:
    memory, key = kept
    ends = ends_of(other, memory, "second", key)
    assert len(ends) == 3
    assert all(isinstance(end, UsageError) for end in ends.values())
    with pytest.raises(UsageError, match=says):
        raise ends[0]


def test_servers_that_all_leave_have_written_their_state_first() -> None:
    memory = Memory({})

    def begin(session: Any) -> None:
        session.checkpoint(memory, every=1000)

    run(train(), range(3), Faults(leaves={0: 4, 1: 4, 2: 4}), lambda *_: None, begin, "first")
    key = newest_whole(memory)
    assert key.n_parts == 1
    for value, complete in ends_of(train(), memory, "second", key).values():
        assert complete
        assert (value == sum(range(72)) / 12).all()


def test_a_server_that_leaves_and_cannot_write_its_state_ends_with_the_reason() -> None:
    disk = Memory({}, OSError(errno.ENOSPC, "No space left on device"))
    ends: dict[int, BaseException | None] = {}

    def note(communicator: Any, session: Any, value: Any, error: BaseException | None) -> None:
        ends[communicator.server] = error

    def begin(session: Any) -> None:
        session.checkpoint(disk, every=1000)

    with pytest.warns(UserWarning, match="No space left") as warned:
        run(train(), range(3), Faults(leaves={0: 4, 1: 4, 2: 4}), note, begin, "first")
    said = {str(each.message) for each in warned}
    at_end = {each for each in said if each.startswith("the state with which server ")}
    assert len(ends) == len(at_end) == 3
    # A server that finds no note of the job writes it: the first, and perhaps one at the same time.
    assert said > at_end
    assert all("cannot write to" in each for each in said - at_end)
    for server, error in ends.items():
        assert f"the state with which server {server} left is not kept: server {server} could" in str(error)


@pytest.mark.parametrize("differs_from", [0, 4])
def test_states_that_differ_are_told_and_cost_no_older_checkpoint(differs_from: int) -> None:
    memory = Memory({})

    def own(session: Any) -> Any:
        w, mean = np.zeros(4), np.zeros(1 << 18)
        session.state(params=w, mean=mean)
        for step in session.steps(60):
            if session.n_servers == 1:
                return mean
            w += session.allreduce(np.ones(4))
            mean[:] = step if step < differs_from else session.server
        return None

    with pytest.warns(UserWarning, match="the servers' states differ: name by session.state nothing"):
        ends_of(own, memory, "first", every=2)
    if not differs_from:
        with pytest.raises(UsageError, match="no checkpoint in"):
            newest_whole(memory)
    else:
        (mean,) = ends_of(own, memory, "second", newest_whole(memory), n_servers=1).values()
        assert (mean == mean[0]).all()
        assert mean[0] < differs_from


def test_a_checkpoint_is_asked_for_before_the_first_loop() -> None:
    def late(session: Any) -> None:
        for _ in session.steps(1):
            session.checkpoint(Memory({}))

    ends = ends_of(late, Memory({}), "job")
    assert all("before the first loop" in str(end) for end in ends.values())


def test_servers_that_want_other_checkpoints_are_told_so() -> None:
    def differs(session: Any) -> Any:
        session.checkpoint(Memory({}), every=1 + session.server)
        return train()(session)

    assert any("StepMismatch" in type(end).__name__ for end in ends_of(differs, Memory({}), "job").values())
