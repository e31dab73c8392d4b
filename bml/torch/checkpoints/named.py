"""The values of a checkpoint as PyTorch names them.

model       as model.state_dict() has it
optimizer   as get_optimizer_state_dict of torch.distributed.checkpoint.state_dict has it
scheduler   as its state_dict() has it
params      parameters of the optimizer that the model does not have
buffers     buffers that are no part of model.state_dict()
state       other arrays that were named by session.state
values      other values that were named by session.state_fn
bml         what `import_checkpoint` takes: the manifest of the snapshot, steps, job
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch

from bml.torch.attached import plain
from bml.torch.attached.state import KEY, Layout
from bml.train.keeping.parts import Key
from bml.train.snapshot import Manifest
from bml.train.state import unpacked

Place = tuple[str, ...]
"""The keys, from the outermost one on, of a value in a dict of dicts."""


class NamedValues:
    """Where the values of a snapshot are in a dict as torch.distributed.checkpoint takes it."""

    def __init__(self, manifest: Manifest):
        self._manifest = manifest
        self._values = {key: unpacked(each) for key, each in msgspec.msgpack.decode(manifest.saved).items()}
        attached = self._values.pop(KEY, None)
        self._attached: list[Any] | None = None
        self._layout = Layout()
        if attached is not None:
            *self._attached, layout = plain.unpacked(attached)
            self._layout = Layout.load(layout)

    def places(self) -> list[tuple[Place, ...]]:
        """Of each array of the snapshot its places."""
        return [self._places(name) for name, *_ in self._manifest.arrays]

    def tensors(self) -> list[torch.Tensor]:
        """Uninitialised tensors for all arrays, of the dtypes that the training used."""
        found = []
        for name, dtype, shape in self._manifest.arrays:
            tensor = torch.from_numpy(np.empty(shape, dtype))
            other = self._layout.dtypes.get(name)
            found.append(tensor if other is None else tensor.view(getattr(torch, other)))
        return found

    def whole(self, tensors: list[torch.Tensor], key: Key) -> dict[str, Any]:
        """Everything, with these tensors."""
        found: dict[str, Any] = {}
        for places, tensor in zip(self.places(), tensors, strict=True):
            for place in places:
                _put(found, place, tensor)
        if self._attached is not None:
            groups, numbers, scheduler = self._attached
            for name, values in numbers.items():
                for what, value in values.items():
                    _put(found, ("optimizer", "state", name, what), value)
            found.setdefault("optimizer", {})["param_groups"] = [
                {**group, "params": names} for group, names in zip(groups, self._layout.groups, strict=True)
            ]
            if scheduler is not None:
                found["scheduler"] = scheduler
        if self._values:
            found["values"] = _for_torch(self._values)
        manifest = msgspec.msgpack.encode(self._manifest)
        found["kept"] = {"manifest": manifest, "steps": key.steps, "job": key.job}
        return found

    def _places(self, name: str) -> tuple[Place, ...]:
        kind, _, rest = name.partition(".")
        if self._attached is None or kind not in ("params", "buffers", "optimizer"):
            return (("state", name),)
        if kind == "optimizer":
            parameter, _, what = rest.rpartition(".")
            return (("optimizer", "state", parameter, what),)
        found = tuple(("model", other) for other in self._layout.model.get(name, ()))
        return found or ((kind, rest),)


def _put(found: dict[str, Any], place: Place, value: Any) -> None:
    for each in place[:-1]:
        found = found.setdefault(each, {})
    found[place[-1]] = value


def _for_torch(value: Any) -> Any:
    """Arrays as tensors, and their elements as numbers."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {name: _for_torch(each) for name, each in value.items()}
    return [_for_torch(each) for each in value] if isinstance(value, list) else value
