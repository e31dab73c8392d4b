"""Converts checkpoints of bml to the format of torch.distributed.checkpoint, and back."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed.checkpoint as dcp

from bml.topology.errors import UsageError
from bml.torch.attached.memory import bits_of
from bml.torch.checkpoints.named import NamedValues
from bml.train.keeping.files import why
from bml.train.keeping.parts import Key, by_key, decode_key
from bml.train.keeping.resuming import newest_whole, read
from bml.train.keeping.stores import files_of, folder_of
from bml.train.keeping.writer import Writer
from bml.train.snapshot import Manifest, Snapshot, arrays_of, decode_manifest, manifest_of

_OURS = ("manifest", "steps", "job")


def export_checkpoint(source: str | os.PathLike[str], folder: str | os.PathLike[str]) -> Key:
    """Write the newest whole checkpoint of the folder, or URL, `source` to a new folder for PyTorch.

    `torch.distributed.checkpoint.load` reads the folder, on any number of processes, without bml. A model
    that `bml.torch.attach` trained is under "model" as `model.state_dict()` names it, its optimizer under
    "optimizer" as `get_optimizer_state_dict` does, the scheduler's state under "scheduler", other arrays
    under "state", other values under "values". Returns which checkpoint it was.

    Raises UsageError if there is no whole checkpoint, and for a folder that has files, is a URL, or cannot be
    written.
    """
    at = Path(folder_of(folder))
    try:
        if at.exists() and (not at.is_dir() or any(at.iterdir())):
            raise UsageError(f"{folder} is there and has files: give a new folder")
        files = files_of(source)
        key = newest_whole(files)
        data = read(files, key)
    except OSError as error:
        raise UsageError(f"checkpoints cannot be read in {error.filename or source}: {why(error)}") from error
    manifest = manifest_of(data)
    named = NamedValues(manifest)
    tensors = named.tensors()
    for tensor, array in zip(tensors, arrays_of(data, manifest), strict=True):
        bits_of(tensor)[...] = array
    _carry_out(
        lambda: dcp.save(named.whole(tensors, key), checkpoint_id=at, no_dist=True), f"written to {at}"
    )
    return key


def import_checkpoint(folder: str | os.PathLike[str], target: str | os.PathLike[str]) -> Key:
    """Make a checkpoint, in the new folder or URL `target`, of a folder that `export_checkpoint` wrote.

    Tensors may have been changed since; all other values are those of the checkpoint that was exported. It
    returns which one it was; `bml run --resume` goes on from it. A folder that PyTorch alone wrote says
    nothing of loops and samples: load it in the training function, before `bml.torch.attach`.

    Raises UsageError for such a folder, for one that cannot be read, and if `target` has checkpoints.
    """
    at = Path(folder_of(folder))
    ours: dict[str, Any] = {f"kept.{name}": None for name in _OURS}
    known = _carry_out(lambda: dcp.FileSystemReader(at).read_metadata(), f"read in {at / '.metadata'}")
    if not set(ours) <= set(known.state_dict_metadata):
        raise UsageError(
            f"{folder} was not written by bml checkpoint export: load it with torch.distributed.checkpoint "
            "in the training function, before bml.torch.attach"
        )
    _load(ours, at)
    key: Key
    manifest, key = _carry_out(lambda: _what_was_exported(ours), f"read in {at}")
    named = NamedValues(manifest)
    tensors = named.tensors()
    found = {".".join(place[0]): each for each, place in zip(tensors, named.places(), strict=True)}
    if lacks := sorted(set(found) - set(known.state_dict_metadata)):
        raise UsageError(f"{folder} does not have {lacks[0]}, without which the training cannot go on")
    _load(found, at)
    _write(key, Snapshot(manifest, [bits_of(each) for each in tensors]), target)
    return key


def _what_was_exported(ours: dict[str, Any]) -> tuple[Manifest, Key]:
    manifest = decode_manifest(ours["kept.manifest"])
    return manifest, decode_key(msgspec.msgpack.encode((ours["kept.steps"], ours["kept.job"], 1)))


def _write(key: Key, snapshot: Snapshot, target: str | os.PathLike[str]) -> None:
    files = files_of(target)
    try:
        has_some = bool(by_key(files.names()))
    except OSError as error:
        raise UsageError(f"checkpoints cannot be read in {error.filename or target}: {why(error)}") from error
    if has_some:
        raise UsageError(f"{target} has checkpoints: give a new folder")
    writer = Writer(files, 0, keep=1)
    writer.write(key, snapshot)
    writer.close()
    if writer.error:
        raise UsageError(f"the checkpoint cannot be written to {target}: {writer.error}")


def _load(found: dict[str, Any], at: Path) -> None:
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    _carry_out(lambda: dcp.load(found, checkpoint_id=at, planner=planner, no_dist=True), f"read in {at}")


def _carry_out(act: Any, what: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that this is a single process
            return act()
    except (Exception, dcp.CheckpointException) as error:  # files are pickles: damaged ones raise anything
        raise UsageError(f"the checkpoint cannot be {what}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """The reason in one line. torch's own exception holds that of each rank, here of one, and tracebacks."""
    if isinstance(error, dcp.CheckpointException) and error.failures:
        error, _ = next(iter(error.failures.values()))
    text = why(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}".rstrip(": ")
    return " ".join(text.split())
