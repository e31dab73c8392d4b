"""Checkpoints in a bucket of a server that speaks S3."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import launch

import bml
from bml.errors import UsageError
from bml.train.keeping.parts import Key
from bml.train.keeping.resuming import newest_whole
from bml.train.keeping.settings import Keeping, has_checkpoints
from bml.train.keeping.stores import Store, files_of
from bml.train.keeping.writer import Writer
from bml.train.snapshot import Snapshot, snapshot
from bml.train.state import NamedState

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("s3fs")
pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(200),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings(
        "ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning"
    ),
]


def state_of(n: int, fill: float = 1.0) -> Snapshot:
    state, w = NamedState(), np.full(n, fill)
    state.name({"w": w})
    return snapshot(state, (), (0, 1), b"")


def written(files: Any, steps: int, n: int = 100) -> Key:
    key, writer = Key(steps, "bml-1", 1), Writer(files, 0, keep=2)
    writer.write(key, state_of(n, float(steps)))
    writer.close()
    assert not writer.error
    return key


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """The URL of a bucket of a server of S3 on this machine."""
    from moto.server import ThreadedMotoServer

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    server = ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        url = f"http://{host}:{port}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        name = tmp_path.name.replace("_", "-")[:60]
        fsspec.filesystem("s3", endpoint_url=url, skip_instance_cache=True).mkdir(name)
        yield f"s3://{name}"
    finally:
        server.stop()


def train(session: Any, ends: int = 0) -> list[float]:
    """Steps of which the sum of the samples' numbers is the result."""
    w = np.zeros(100)
    session.state(params=w)

    def gradient(indices: Any) -> Any:
        return np.full(100, float(indices.sum()))

    for batch in session.batches(12 * 60, global_batch=12, epochs=1, seed=1):
        if batch.batch_no == ends > 0:
            raise RuntimeError("ends here")
        w += 12 * batch.allreduce(gradient(batch.indices), recompute=gradient)
    return w.tolist()


def test_a_job_goes_on_from_a_bucket(bucket: str) -> None:
    kept = f"{bucket}/kept"
    keeping: dict[str, Any] = {"checkpoint": kept, "resume": kept, "every": 5, "keep": 1}
    with pytest.raises(bml.BmlError, match="ends here"):
        launch(partial(train, ends=23), "bcube:2x1", **keeping)
    key = newest_whole(files_of(kept))
    assert key.steps >= 5
    assert has_checkpoints(kept)
    again = launch(train, "bcube:2x1", **keeping)
    assert again.value == pytest.approx([sum(range(12 * 60))] * 100)
    assert again.report["steps"] < 60
    assert again.report["samples"]["complete"]
    assert newest_whole(files_of(kept)).steps > key.steps
    assert not [name for name in files_of(kept).names() if not name.startswith("0")]
    for shown in again.report["metrics"].values():
        assert not shown["checkpoints"]["error"]


def test_objects_of_s3(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.at(f"{bucket}/kept")
    assert store.names() == []
    key = written(store, 100, n=2 << 20)  # so many bytes are sent in several requests
    monkeypatch.setattr(store._system, "default_block_size", 5 << 20)
    later = written(store, 200, n=2 << 20)
    assert newest_whole(store) == later

    def breaks() -> Iterator[bytes]:
        yield bytes(12 << 20)
        raise OSError("the connection broke")

    with pytest.raises(OSError, match="the connection broke"):
        store.write(later.file(0), breaks())
    assert newest_whole(store) == later, "an object that was not written whole takes no other's place"
    whole = b"".join(store.read(later.file(0)))
    store.write(later.file(0), [whole[:-1]])
    assert newest_whole(store) == key
    other = f"{bucket}-no-such-bucket/kept"
    writer = Writer(files_of(other), 0, keep=1)
    writer.write(key, state_of(1))
    writer.close()
    assert "could not write its part: The specified bucket does not exist" in writer.error
    with pytest.raises(UsageError, match=r"there is no checkpoint in s3://.*no-such-bucket/kept"):
        Keeping.of(None, 1, 1, other)
