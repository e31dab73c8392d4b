"""Checkpoints in object stores: file systems of fsspec."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from bml.errors import UsageError
from bml.train.keeping.files import Folder
from bml.train.keeping.parts import Key
from bml.train.keeping.resuming import clear_unbegun, newest_whole, read
from bml.train.keeping.settings import Keeping, has_checkpoints
from bml.train.keeping.stores import Store, files_of, folder_of, place_of
from bml.train.keeping.writer import Writer
from bml.train.snapshot import Snapshot, snapshot
from bml.train.state import NamedState

JOB = "bml-1"


def made(fill: float = 1.0, n: int = 100) -> Snapshot:
    state, w = NamedState(), np.full(n, fill)
    state.name({"w": w})
    return snapshot(state, (), (0, 1), b"")


def written(files: Any, steps: int, n_parts: int = 3, fill: float = 1.0, n: int = 100) -> Key:
    key = Key(steps, JOB, n_parts)
    for part in range(n_parts):
        writer = Writer(files, part, keep=2)
        writer.begin(key, part, made(fill, n))
        writer.close()
        assert not writer.error
    return key


def memory(path: Path) -> Store:
    return Store.at(f"memory:/{path}/kept")


def local(path: Path) -> Store:
    return Store(LocalFileSystem(), str(path / "kept"), "local")


def dirfs(path: Path) -> Store:
    (path / "kept").mkdir(exist_ok=True)
    return Store(DirFileSystem(str(path), LocalFileSystem()), "kept", "dirfs")


@pytest.fixture(params=[memory, local, dirfs])
def store(request: Any, tmp_path: Path) -> Store:
    made: Store = request.param(tmp_path)
    return made


def test_a_checkpoint_is_read_as_it_was_written(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bml.train.keeping.stores.PIECE_NBYTES", 1000)
    assert store.names() == []
    written(store, 100)
    key = written(store, 200, n_parts=2, fill=2.0, n=1000)
    assert newest_whole(store) == key
    whole = made(2.0, 1000)
    assert bytes(read(store, key)) == bytes(whole[0 : len(whole)])
    for steps in (300, 400):
        written(store, steps)
    store.remove(key.file(0))
    store.remove(key.file(0))
    assert key.file(0) not in store.names()


def test_torn_and_changed_objects_cost_that_checkpoint_alone(store: Store) -> None:
    older, key = written(store, 100), written(store, 200, fill=2.0)
    name = key.file(1)
    whole = b"".join(store.read(name))
    for damaged in (whole[:-1], whole[:300], b"", whole[:200] + bytes([whole[200] ^ 4]) + whole[201:]):
        store.write(name, [damaged])
        assert newest_whole(store) == older
    store.write(name, [whole])
    assert newest_whole(store) == key
    store.remove(name)
    assert newest_whole(store) == older


@pytest.mark.parametrize("make", [memory, local])
def test_an_object_that_was_not_written_whole_is_not_there(make: Any, tmp_path: Path) -> None:
    store = make(tmp_path)

    def breaks() -> Iterator[bytes]:
        yield bytes(1000)
        raise OSError("the connection broke")

    with pytest.raises(OSError, match="the connection broke"):
        store.write("x", breaks())
    assert store.names() == []
    store.write("y", [b"1"])
    assert store.names() == ["y"]


class Failing(MemoryFileSystem):  # type: ignore[misc]
    """A store whose calls fail as those of its package do: with no OSError."""

    protocol = "failing"
    cachable = False
    fails: tuple[str, ...] = ()

    def _check(self, what: str) -> None:
        if what in self.fails:
            raise RuntimeError(f"no credentials to {what}")

    def ls(self, path: str, detail: bool = True, **how: Any) -> Any:
        self._check("ls")
        return super().ls(path, detail=detail, **how)

    def cat_file(self, path: str, **how: Any) -> Any:
        self._check("cat")
        return super().cat_file(path, **how)

    def _open(self, path: str, mode: str = "rb", **how: Any) -> Any:
        self._check(mode)
        return super()._open(path, mode, **how)


def test_a_store_that_fails_is_a_warning_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = Failing()
    store = Store(system, f"{tmp_path}/kept", "failing://kept")
    written(store, 100, n_parts=1)
    writer = Writer(store, 0, 3)
    for fails in ("wb", "ls"):
        system.fails = (fails,)
        writer.write(Key(200, JOB, 1), made())
        assert f"no credentials to {fails}" in writer.news()
    system.fails = ("cat",)
    with pytest.raises(UsageError, match="part 0 of 1 cannot be read: RuntimeError: no credentials to cat"):
        newest_whole(store)
    system.fails = ()
    writer.write(Key(200, JOB, 1), made(2.0))
    assert not writer.error
    assert newest_whole(store).steps == 200
    system.fails = ("ls",)
    monkeypatch.setattr("bml.train.keeping.settings.files_of", lambda url: store)
    with pytest.raises(UsageError, match=r"checkpoints cannot be read in failing://kept: Run.*to ls"):
        Keeping.of(None, 1, 1, "failing://kept")
    assert not has_checkpoints("failing://kept")


class Uncommitted(MemoryFileSystem):  # type: ignore[misc]
    """A file system whose files cannot be committed, such as hdfs."""

    protocol = "uncommitted"
    cachable = False

    def _open(self, path: str, mode: str = "rb", **how: Any) -> Any:
        file = super()._open(path, mode, **how)
        if mode == "rb":
            return file
        file.commit()  # it is seen before it is whole
        return io.BufferedWriter(Raw(file))


class Raw(io.RawIOBase):
    def __init__(self, file: Any):
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, piece: Any) -> int:
        return int(self._file.write(piece))


def test_a_file_system_without_commits_is_written_to(tmp_path: Path) -> None:
    store = Store(Uncommitted(), f"{tmp_path}/kept", "uncommitted://kept")
    assert not store.names_are_whole
    assert memory(tmp_path).names_are_whole
    written(store, 100)
    key = written(store, 200)
    assert newest_whole(store) == key

    def breaks() -> Iterator[bytes]:
        yield bytes(100_000)
        raise OSError("the connection broke")

    with pytest.raises(OSError, match="the connection broke"):
        store.write(Key(300, JOB, 1).file(0), breaks())
    assert newest_whole(store) == key
    newer = written(store, 400)
    assert newest_whole(store) == newer


def test_parts_that_are_listed_late_are_not_taken_for_parts_of_a_job_that_had_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = memory(tmp_path)
    key = written(store, 100)
    monkeypatch.setattr(Store, "names", lambda self: [key.file(1)])
    assert not clear_unbegun(store, 200)
    assert newest_whole(store) == key


def test_paths_and_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(files_of(tmp_path), Folder)
    for prefix in ("file://", "local://"):
        assert str(files_of(f"{prefix}{tmp_path}")) == str(tmp_path)
    assert isinstance(files_of("memory://kept"), Store)
    monkeypatch.chdir(tmp_path)
    for same in ("kept", "kept/", "file://kept", "file://kept/", f"file://{tmp_path}/kept", Path("kept")):
        assert Keeping.of(same, 1, 1, None).folder == str(tmp_path / "kept")
    assert place_of("s3://bucket/kept//") == place_of("s3://bucket/kept") == "s3://bucket/kept"
    for was_url in (Path("s3://bucket/kept"), "s3:/bucket/kept", Path("simplecache::s3://bucket")):
        with pytest.raises(UsageError, match=r":/bucket.* is neither .*: give the URL as a text"):
            Keeping.of(was_url, 1, 1, None)
        with pytest.raises(UsageError, match="give the URL as a text"):
            files_of(was_url)
    assert place_of("./s3:/bucket") == str(tmp_path / "s3:" / "bucket")
    with pytest.raises(UsageError, match="s3://bucket/kept is a URL: give a folder of this machine"):
        folder_of("s3://bucket/kept/")
    assert Keeping.of(tmp_path, 1, 1, None).folder == str(tmp_path)
    with pytest.raises(UsageError, match="memory://kept: each process has such memory of its own"):
        Keeping.of("memory://kept", 1, 1, None)
    with pytest.raises(
        UsageError, match=r"nothing://kept cannot be opened: .*give a folder, or a URL such as s3"
    ):
        Keeping.of("nothing://kept", 1, 1, None)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.setattr(sys.modules["fsspec.registry"], "_registry", {})
    with pytest.raises(UsageError, match=r"s3://bucket/kept cannot be opened: .*[Ii]nstall s3fs"):
        Keeping.of("s3://bucket/kept", 1, 1, None)
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(UsageError, match=r"s3://bucket/kept is a URL.*fsspec: pip install 'bml\[store\]'"):
        Keeping.of(None, 1, 1, "s3://bucket/kept")
