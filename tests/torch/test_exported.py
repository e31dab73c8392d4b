"""Checkpoints in the format of torch.distributed.checkpoint: PyTorch reads them, and bml takes them back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import exported_programs as plain  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from jobs_in_threads import on_servers, samples  # noqa: E402

import bml.torch  # noqa: E402
from bml.errors import UsageError  # noqa: E402
from bml.sim.programs.faults import Faults  # noqa: E402
from bml.train.keeping.files import Folder  # noqa: E402
from bml.train.keeping.resuming import Resumed, newest_whole, read  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def training(dtype: Any, begin: Any = lambda session: None) -> Any:
    def train(session: Any) -> Any:
        begin(session)
        model = plain.model_of(dtype)
        optimizer = plain.optimizer_of(model)
        scheduler = plain.scheduler_of(optimizer)
        average = np.zeros((6, 6))
        session.state(average=average)
        log: list[Any] = [1, "x"]
        session.state_fn("log", log.extend, lambda: [*log, np.float32(2)])
        run = bml.torch.attach(session, model, optimizer, scheduler)
        for x, y in run.batches(samples(), global_batch=24, epochs=3, seed=3):
            if session.n_servers == 1:
                return plain.held(model, optimizer, scheduler)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x.to(dtype)), y, reduction="sum").backward()
            optimizer.step()
            scheduler.step()
            average += model[0].weight.detach().double().numpy()
        held = plain.held(model, optimizer, scheduler)
        return held if session.n_servers == 1 else (held, average)  # the checkpoint may be that of the end

    return train


def resuming(folder: Path) -> Any:
    def begin(session: Any) -> None:
        files = Folder(str(folder))
        session.resume(Resumed(key := newest_whole(files), read(files, key)))

    return begin


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plain_torch_has_the_same_bits_and_bml_goes_on_from_them(tmp_path: Path, dtype: str) -> None:
    kept, exported, back = (tmp_path / name for name in ("kept", "exported", "back"))
    keeps = training(getattr(torch, dtype), lambda session: session.checkpoint(kept, every=3))
    assert not on_servers(keeps, faults=Faults(ends_after=11)).values
    key = bml.torch.export_checkpoint(kept, exported)
    assert key == newest_whole(Folder(str(kept)))
    (wanted,) = on_servers(training(getattr(torch, dtype), resuming(kept)), n_servers=1).values.values()
    assert plain.loaded(str(exported), dtype) == wanted
    assert bml.torch.import_checkpoint(exported, back) == key._replace(n_parts=1)
    files, other = Folder(str(kept)), Folder(str(back))
    assert bytes(read(other, newest_whole(other))) == bytes(read(files, key))
    ends = [on_servers(training(getattr(torch, dtype), resuming(each))).value for each in (kept, back)]
    assert ends[0][0] == ends[1][0]
    assert (ends[0][1] == ends[1][1]).all()


@pytest.mark.slow
def test_a_process_without_bml_has_the_same_bits(tmp_path: Path) -> None:
    kept, exported = tmp_path / "kept", tmp_path / "exported"
    on_servers(training(torch.float32, lambda session: session.checkpoint(kept, every=3)))
    bml.torch.export_checkpoint(kept, exported)
    (wanted,) = on_servers(training(torch.float32, resuming(kept)), n_servers=1).values.values()
    command = [sys.executable, plain.__file__, str(exported), "float32"]
    assert json.loads(subprocess.run(command, check=True, capture_output=True, timeout=100).stdout) == wanted


def test_a_state_of_numpy_is_exported(tmp_path: Path) -> None:
    kept = tmp_path / "kept"

    def train(session: Any) -> None:
        session.checkpoint(kept, every=1)
        w = [np.zeros(3), np.zeros((2, 2), np.int64)]
        session.state(params=w)
        session.state_fn("rate", lambda value: None, lambda: {"rate": np.ones(2), "n": np.int64(3)})
        for _ in session.steps(5):
            w[0] += session.allreduce(np.ones(3), "avg")

    on_servers(train)
    bml.torch.export_checkpoint(kept, tmp_path / "exported")
    state = {
        "state": {"params[0]": torch.zeros(3, dtype=torch.float64)},
        "values": {"rate": {"rate": torch.zeros(2, dtype=torch.float64), "n": 0}},
    }
    dcp.load(state, checkpoint_id=tmp_path / "exported", no_dist=True)
    assert 1 <= state["state"]["params[0]"][0] <= 5
    assert state["values"]["rate"]["rate"].tolist() == [1, 1]
    assert state["values"]["rate"]["n"] == 3


def test_what_cannot_be_converted_is_told(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    with pytest.raises(UsageError, match="there is no checkpoint in"):
        bml.torch.export_checkpoint(kept, tmp_path / "exported")
    on_servers(training(torch.float32, lambda session: session.checkpoint(kept, every=3)))
    (tmp_path / "file").write_text("x")
    for there in (tmp_path, tmp_path / "file"):
        with pytest.raises(UsageError, match="is there and has files: give a new folder"):
            bml.torch.export_checkpoint(kept, there)
    with pytest.raises(UsageError, match=r"^the checkpoint cannot be written to /proc/none: [\w ]+$"):
        bml.torch.export_checkpoint(kept, "/proc/none")
    with pytest.raises(UsageError, match=r"cannot be read in .*none"):
        bml.torch.import_checkpoint(tmp_path / "none", tmp_path / "back")
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "plain", no_dist=True)
    with pytest.raises(UsageError, match="was not written by bml checkpoint export: load it with torch"):
        bml.torch.import_checkpoint(tmp_path / "plain", tmp_path / "back")
    bml.torch.export_checkpoint(kept, tmp_path / "exported")
    with pytest.raises(UsageError, match="kept has checkpoints: give a new folder"):
        bml.torch.import_checkpoint(tmp_path / "exported", kept)
    for folder in ("s3://bucket/x", Path("s3://bucket/x")):
        with pytest.raises(UsageError, match=r"is a URL: give a folder|give the URL as a text"):
            bml.torch.export_checkpoint(kept, folder)
    metadata = tmp_path / "exported" / ".metadata"
    whole = metadata.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", whole.replace(b"torch.distributed", b"torch.distributes")):
        metadata.write_bytes(damaged)
        with pytest.raises(UsageError, match=r"the checkpoint cannot be read in .*exported/\.metadata: \w+"):
            bml.torch.import_checkpoint(tmp_path / "exported", tmp_path / "back")
    metadata.write_bytes(whole)
    for data in (tmp_path / "exported").glob("*.distcp"):
        kept_data = data.read_bytes()
        for n in (0, len(kept_data) // 2):
            data.write_bytes(kept_data[:n])
            with pytest.raises(UsageError, match=r"^the checkpoint cannot be read in .*exported: \w.*\w.*$"):
                bml.torch.import_checkpoint(tmp_path / "exported", tmp_path / "back")
        data.write_bytes(kept_data)
    assert not (tmp_path / "back").exists()
    bml.torch.import_checkpoint(tmp_path / "exported", tmp_path / "back")
