"""The training state of a model, its optimizer and its scheduler, as a session names it."""

from __future__ import annotations

from itertools import chain
from typing import Any, Protocol

import msgspec
import torch

from bml.topology.errors import UsageError
from bml.torch.attached.memory import array_of, is_of_numpy
from bml.torch.attached.plain import packed, unpacked
from bml.train.state import Load, Save

KEY = "bml.torch"
"""The name of all values that are no tensors."""
_PARAMS = "params"


class Names(Protocol):
    """Takes names of training state, as a Session does."""

    def state(self, **arrays: Any) -> None: ...  # noqa: D102

    def state_fn(self, key: str, load: Load, save: Save) -> None: ...  # noqa: D102


class Layout(msgspec.Struct):
    """What PyTorch calls the state, for those who read it without the model."""

    groups: list[list[str]] = []
    """The names of the parameters of each group of the optimizer."""
    model: dict[str, list[str]] = {}
    """By the name of an array its names in model.state_dict(), several if it is shared by modules."""
    dtypes: dict[str, str] = {}
    """By the name of an array its dtype in torch, if numpy has not got it."""

    def dump(self) -> bytes:
        """The layout as bytes."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def load(cls, dumped: bytes) -> Layout:
        """Read the bytes of `dump`. Raises msgspec.MsgspecError for other bytes."""
        return _decode(dumped)


_decode = msgspec.msgpack.Decoder(Layout).decode


class TrainingState:
    """Parameters, buffers and the optimizer's tensors are filled in place, all other values are loaded.

    Without `buffers` those of the model are left as they are.
    """

    def __init__(self, model: Any, optimizer: Any, scheduler: Any, buffers: bool = True):
        self._optimizer, self._scheduler = optimizer, scheduler
        self._parameters = dict(model.named_parameters())
        known = {id(each): name for name, each in self._parameters.items()}
        for number, group in enumerate(optimizer.param_groups):
            for place, each in enumerate(group[_PARAMS]):
                if id(each) not in known:
                    known[id(each)] = f"param_groups[{number}][{place}]"
                    self._parameters[known[id(each)]] = each
        self._buffers = {
            f"{path}.{name}".lstrip("."): (module, name, buffer)
            for path, module in model.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and buffers
        }
        self._tensors = {
            name: {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
            for name, state in self._states()
        }
        self._layout = self._layout_of(model).dump()
        self._places = {name: each.data_ptr() for name, each in self._parameters.items()}

    def _layout_of(self, model: Any) -> Layout:
        tensors = {f"{_PARAMS}.{name}": each for name, each in self._parameters.items()}
        tensors.update({f"buffers.{name}": each for name, (*_, each) in self._buffers.items()})
        own = {id(each): name for name, each in tensors.items()}
        hidden = {
            f"{path}.{name}".lstrip(".")
            for path, module in model.named_modules()
            for name in module._non_persistent_buffers_set
        }
        called: dict[str, list[str]] = {}
        for name, each in chain(
            model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
        ):
            if id(each) in own and name not in hidden:
                called.setdefault(own[id(each)], []).append(name)
        for name, state in self._tensors.items():
            tensors.update({f"optimizer.{name}.{key}": each for key, each in state.items()})
        dtypes = {name: each.dtype for name, each in tensors.items()}
        names = {id(each): name for name, each in self._parameters.items()}
        groups = [[names[id(each)] for each in group[_PARAMS]] for group in self._optimizer.param_groups]
        unseen = {each for each in set(dtypes.values()) if not is_of_numpy(each)}
        texts = {name: str(each).removeprefix("torch.") for name, each in dtypes.items() if each in unseen}
        return Layout(groups, called, texts)

    def name(self, session: Names) -> None:
        """Name everything. Raises UsageError for what servers that join cannot be given."""
        session.state(
            params={
                name: array_of(each, f"the parameter {name!r}") for name, each in self._parameters.items()
            },
            buffers={
                name: array_of(each, f"the buffer {name!r}") for name, (*_, each) in self._buffers.items()
            },
            optimizer={
                name: {key: array_of(each, f"{key!r} of {name!r}") for key, each in tensors.items()}
                for name, tensors in self._tensors.items()
            },
        )
        session.state_fn(KEY, self.load, self.save)

    def save(self) -> Any:
        """Return all other values: parameter groups, scheduler, numbers of the optimizer's state."""
        groups = [
            {key: value for key, value in group.items() if key != _PARAMS}
            for group in self._optimizer.param_groups
        ]
        numbers = {
            name: {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
            for name, state in self._states()
        }
        scheduler = self._scheduler.state_dict() if self._scheduler is not None else None
        return packed([groups, numbers, scheduler, self._layout])

    def load(self, saved: Any) -> None:
        """Take what `save` returned on another server. Raises UsageError for other parameter groups."""
        groups, numbers, scheduler, _ = unpacked(saved)
        if len(groups) != len(self._optimizer.param_groups):
            raise UsageError(
                f"this optimizer has {len(self._optimizer.param_groups)} parameter groups, those of the "
                f"others have {len(groups)}: make the same groups on all servers"
            )
        for group, values in zip(self._optimizer.param_groups, groups, strict=True):
            for key, value in values.items():
                if isinstance(group.get(key), torch.Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value
        for name, values in numbers.items():
            self._optimizer.state[self._parameters[name]].update(values)
        if self._scheduler is not None:
            self._scheduler.load_state_dict(scheduler)

    def _states(self) -> list[tuple[str, dict[str, Any]]]:
        """Names of parameters, and what the optimizer has of each."""
        state = self._optimizer.state
        return [(name, state[each]) for name, each in self._parameters.items() if each in state]

    def check(self) -> None:
        """Raise UsageError for a tensor of which the session does not know, as it was made since."""
        with torch._C.DisableTorchFunctionSubclass():  # the values are not read, and may be late
            moved = [name for name, each in self._parameters.items() if each.data_ptr() != self._places[name]]
        for name in moved:
            raise _replaced(f"the memory of the parameter {name!r}")
        for name, (module, short, buffer) in self._buffers.items():
            if module._buffers.get(short) is not buffer:
                raise _replaced(f"the buffer {name!r}")
        for name, tensors in self._tensors.items():
            state = self._optimizer.state[self._parameters[name]]
            for key, tensor in tensors.items():
                if state.get(key) is not tensor:
                    raise _replaced(f"{key!r} of the optimizer's state of {name!r}")
        names = {id(each): name for name, each in self._parameters.items()}
        for each, state in self._optimizer.state.items():
            if isinstance(each, torch.Tensor):
                self._check_known(names.get(id(each)), state)

    def _check_known(self, name: str | None, state: dict[str, Any]) -> None:
        known = self._tensors.get(name, {}) if name is not None else {}
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and key not in known:
                of = f"the parameter {name!r}" if name is not None else "a parameter that it was given later"
                raise UsageError(
                    f"the optimizer has made {key!r} of {of} since it was attached, and servers that join "
                    "would not get it: give the optimizer its parameters and its settings before attach"
                )


def _replaced(what: str) -> UsageError:
    return UsageError(
        f"{what} was replaced since it was attached, and servers that join would get the old one: change "
        "tensors in place (copy_), and load checkpoints before attach"
    )
