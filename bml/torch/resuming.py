"""Loops of torch.distributed in which a rank that was started again takes its place among the others.

The restarted process runs the same script. Until its first loop it is alone: broadcasts and all-gathers, such
as those with which DDP begins, give it its own values. `epochs` then waits for the training state of the
others, and the loops go on where the others are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bml.topology.errors import UsageError
from bml.torch.attached.optimizers import keep_first_gradients, prime
from bml.torch.attached.state import TrainingState
from bml.torch.process_group import ProcessGroup
from bml.train.position import Mark, Path
from bml.train.snapshot import Snapshot, manifest_of, restore, snapshot
from bml.train.state import Load, NamedState, Save

Item = TypeVar("Item")


def resumable(model: Any, optimizer: Any, scheduler: Any = None, **more: Any) -> Resumable:
    """Name the training state of this rank, so that ranks that are started again are given it.

    `model` is an nn.Module, or DDP round one with `find_unused_parameters=True`: otherwise DDP orders its
    buckets anew after the first iteration, and those of a rank that joins would differ. `scheduler`, and
    `more` (such as `scaler=`), are objects with `state_dict` and `load_state_dict`. Call it on every rank,
    after checkpoints were loaded and before the training loop, with the default group of the backend bml.
    Buffers, such as the running means of batch normalisation, differ between ranks and are not given: with
    `broadcast_buffers=True`, DDP's default, a rank that joins gets them in its next forward pass.

    Raises UsageError for another backend, for DDP without `find_unused_parameters`, and for state that
    cannot be given to another rank.
    """
    group = dist.group.WORLD if dist.is_initialized() else None
    if not isinstance(group, ProcessGroup):
        raise UsageError('the default group is not of the backend bml: call init_process_group("bml") before')
    if isinstance(model, DistributedDataParallel):
        if not model.find_unused_parameters or model.static_graph:
            raise UsageError(
                "a rank that joins needs DistributedDataParallel(…, find_unused_parameters=True) without "
                "static_graph: otherwise its buckets differ from those of the others"
            )
        more["ddp"] = _Flags(model)
        model = model.module
    prime(optimizer)
    keep_first_gradients(optimizer)
    stateful = {key: each for key, each in {"scheduler": scheduler, **more}.items() if each is not None}
    return Resumable(group, TrainingState(model, optimizer, _Stateful(stateful), buffers=False))


class Resumable:
    """The loops of one rank over epochs and batches; `resumable` makes it."""

    def __init__(self, group: ProcessGroup, state: TrainingState):
        self._group = group
        self._training = state
        self._named = _Named()
        state.name(self._named)
        self._epoch, self._index = 0, 0
        self._begun = -1
        """The epoch in which the loop over batches was begun last."""
        self._among: tuple[int, ...] | None = None
        """The contributors of a state that was taken, until this joiner is at its place."""
        self._later: memoryview | None = None
        """A state of the others in a later epoch, for a joiner that has fallen behind."""

    def epochs(self, n_epochs: int) -> Iterator[int]:
        """Iterate over the epochs 0 .. n_epochs-1; a rank that joins begins in that of the others.

        Raises the error that ended the group, if there was no place for this rank any more.
        """
        self._take(self._group.joined())
        while self._epoch < n_epochs:
            epoch = self._epoch
            yield epoch
            if self._later is not None:
                self._take(self._later)
            else:
                self._epoch, self._index = epoch + 1, 0

    def batches(self, loader: Iterable[Item]) -> Iterator[Item]:
        """Iterate over the batches of an epoch, once; a rank that joins skips those that the others have had.

        The training state is given to joiners between two batches: what the loop changes after
        `optimizer.step()`, such as a scheduler, belongs to the iteration. Raises UsageError for a second loop
        in an epoch: iterate over the loader itself, for example to evaluate.
        """
        if self._begun == self._epoch:
            raise UsageError(
                f"there was a loop over batches in epoch {self._epoch}: only one of them can be resumed, "
                "iterate over the loader itself in others"
            )
        self._begun = self._epoch
        for index, batch in enumerate(loader):
            if index < self._index:
                continue
            self._index = index
            self._catch_up()
            if self._later is not None:
                return  # what the loop does at the end of its epoch comes before that state
            if index < self._index:
                continue
            if self._among is not None:
                self._group.is_among(self._among)
                self._among = None
            self._training.check()
            self._group.boundary(self._state)
            yield batch
            self._index = index + 1

    def _catch_up(self) -> None:
        """Take a later state, if this rank joins and has fallen behind."""
        state = self._group.joined()
        if state is not None and _position(manifest_of(state).path)[0] != self._epoch:
            self._later = state
            self._group.stand_aside()
        else:
            self._take(state)

    def _take(self, state: memoryview | None) -> None:
        self._later = None
        if state is not None:
            manifest = restore(state, self._named.values)
            self._epoch, self._index = _position(manifest.path)
            self._among = manifest.contributors

    def _state(self) -> Snapshot:
        path = (Mark(0, self._epoch, "epochs"), Mark(0, self._index, "batches"))
        return snapshot(self._named.values, path, self._group.contributors, b"")


def _position(path: Path) -> tuple[int, int]:
    epochs, batches = path
    return epochs.iteration, batches.iteration


class _Named:
    """Takes the names of a training state as a session does."""

    def __init__(self) -> None:
        self.values = NamedState()

    def state(self, **arrays: Any) -> None:
        self.values.name(arrays)

    def state_fn(self, key: str, load: Load, save: Save) -> None:
        self.values.name_function(key, load, save)


class _Flags:
    """What DDP remembers from one iteration to the next."""

    def __init__(self, ddp: DistributedDataParallel):
        self._ddp = ddp

    def state_dict(self) -> dict[str, Any]:
        return {"require_forward_param_sync": bool(self._ddp.require_forward_param_sync)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self._ddp).update(state)


class _Stateful:
    """Several objects with a state as one."""

    def __init__(self, members: dict[str, Any]):
        for key, each in members.items():
            if not hasattr(each, "load_state_dict"):
                raise UsageError(f"{key}, a {type(each).__name__}, has no state_dict and load_state_dict")
        self._members = members

    def state_dict(self) -> dict[str, Any]:
        return {key: each.state_dict() for key, each in self._members.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if sorted(state) != sorted(self._members):
            raise UsageError(
                f"this rank joins with {sorted(self._members)}, the others have {sorted(state)}: name the "
                "same on all ranks"
            )
        for key, each in self._members.items():
            each.load_state_dict(state[key])
