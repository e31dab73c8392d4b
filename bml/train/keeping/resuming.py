"""Finds the newest whole checkpoint of a folder, and reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bml.topology.errors import UsageError
from bml.train.keeping.files import Files, why
from bml.train.keeping.parts import Damaged, Header, Key, by_key, read_part

_MOST_TOLD = 3


@dataclass(frozen=True)
class Resumed:
    """The bytes of a checkpoint with which a job goes on."""

    key: Key
    data: memoryview


def check_lineage(files: Files, job: str = "", resumed: Key | None = None) -> None:
    """Raise UsageError if another job made checkpoints here, with which this one does not go on.

    `job` is the job that will write, `resumed` the checkpoint with which it goes on.
    """
    known = by_key(files.names())
    others = [key for key in known if key.job != job]
    if others and resumed not in known:
        raise UsageError(
            f"{files} has checkpoints of another job, {others[0].job}: go on from them with --resume, "
            "or give another folder"
        )


def clear_unbegun(files: Files, steps: int) -> bool:
    """Return whether no job has come to a whole checkpoint here, and remove the parts of such jobs.

    So it is if no checkpoint has all of its parts, and none is of more than `steps` steps: a later one may
    have its other parts on other machines, and would be a loss. Parts are opened, as a store
    may list them late.
    """
    found = by_key(files.names())
    if any(key.steps > steps or _has_all(files, key) for key in found):
        return False
    for key, parts in found.items():
        for part in parts:
            files.remove(key.file(part))
    return True


def is_whole(files: Files, key: Key) -> bool:
    """Return whether a checkpoint is whole; every byte is read."""
    try:
        _read(files, key, lambda header, at, piece: None)
    except Damaged:
        return False
    return True


def _has_all(files: Files, key: Key) -> bool:
    try:
        return all(next(iter(files.read(key.file(part))), b"") is not None for part in range(key.n_parts))
    except FileNotFoundError:
        return False


def newest_named(files: Files) -> Key | None:
    """Return the newest checkpoint of which all parts have a name, without a look into them."""
    return max(
        (key for key, parts in by_key(files.names()).items() if len(parts) == key.n_parts), default=None
    )


def newest_whole(files: Files) -> Key:
    """Return the newest whole checkpoint; every byte is read. Raises UsageError if there is none."""
    return newest_and_skipped(files)[0]


def newest_and_skipped(files: Files) -> tuple[Key, list[str]]:
    """Return the newest whole checkpoint, and why each newer one is not whole. Raises as `newest_whole`."""
    found = by_key(files.names())
    if not found:
        raise UsageError(
            f"there is no checkpoint in {files}: give the folder that --checkpoint wrote, or begin without "
            "--resume"
        )
    why = []
    for key in sorted(found, reverse=True):
        try:
            _read(files, key, lambda header, at, piece: None)
        except Damaged as error:
            why.append(f"{key}: {error}")
        else:
            return key, why
    more = f"; and {len(why) - _MOST_TOLD} more" if len(why) > _MOST_TOLD else ""
    raise UsageError(
        f"no checkpoint in {files} is whole ({'; '.join(why[:_MOST_TOLD])}{more}): if its parts lie on "
        "several machines, bring all of them into one folder"
    )


def read(files: Files, key: Key) -> memoryview:
    """Return the snapshot of a checkpoint. Raises UsageError if it is not whole where this server looks."""
    memory: memoryview | None = None

    def take(header: Header, at: int, piece: memoryview) -> None:
        nonlocal memory
        if memory is None:
            memory = np.empty(header.nbytes, np.uint8).data
        if at + len(piece) > len(memory):
            raise Damaged("its parts are of snapshots of several lengths")
        memory[at : at + len(piece)] = piece

    try:
        _read(files, key, take)
    except Damaged as error:
        raise UsageError(
            f"{key} cannot be read in {files} ({error}): every server must see the whole folder"
        ) from None
    assert memory is not None
    return memory


def _read(files: Files, key: Key, take: Callable[[Header, int, memoryview], None]) -> None:
    """Read all parts of a checkpoint. Raises Damaged if one is missing, or they do not belong together."""
    same: set[tuple[int, bytes]] = set()
    for part in range(key.n_parts):
        try:
            header = read_part(files.read(key.file(part)), key, part, take)
        except FileNotFoundError:
            raise Damaged(f"part {part} of {key.n_parts} is missing") from None
        except OSError as error:
            raise Damaged(f"part {part} of {key.n_parts} cannot be read: {why(error)}") from None
        except Damaged as error:
            raise Damaged(f"part {part} of {key.n_parts} is damaged: {error}") from None
        same.add((header.nbytes, header.state))
    if len(same) > 1:
        raise Damaged("the servers that wrote it had different states")
