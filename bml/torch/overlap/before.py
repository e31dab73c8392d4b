"""What a model was in a batch, kept until the batch is whole: lost samples are computed again with it.

Parameters of which the new values came sooner than those of others have their old ones here. Two layers of
which one is new and the other old would give a gradient that no single process has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn


class Before:
    """Old values of parameters, and the buffers and modes of modules at the end of a batch."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._memory: dict[nn.Parameter, torch.Tensor] = {}
        """A copy of each parameter that was ever kept: fresh memory in every batch costs as much again."""
        self._old: list[nn.Parameter] = []
        self._buffers: list[tuple[nn.Module, str, torch.Tensor]] = []
        self._modes: list[tuple[nn.Module, bool]] = []
        self.is_restored = False
        """Whether the model is now as it was: its parameters are not to be waited for."""

    def note(self) -> None:
        """A batch has ended but for the sums: keep buffers and modes as they are."""
        self._modes = [(module, module.training) for module in self._model.modules()]
        with torch.no_grad():
            self._buffers = [
                (module, name, buffer.detach().clone())
                for module in self._model.modules()
                for name, buffer in module._buffers.items()
                if buffer is not None
            ]

    def keep(self, parameters: Sequence[nn.Parameter]) -> None:
        """Keep the values of parameters that are about to change."""
        with torch.no_grad():
            for each in parameters:
                if each in self._memory:
                    self._memory[each].copy_(each)
                else:
                    self._memory[each] = each.detach().clone()
        self._old += parameters

    def forget(self) -> None:
        """The batch is whole: no sample of it can be lost any more."""
        self._old, self._buffers, self._modes = [], [], []

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Let the model be what it was. The pass in which this happens, if any, must not notice."""
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.callback(setattr, self, "is_restored", self.is_restored)
            self.is_restored = True
            if self._modes:
                # Those of a checkpointed module count what its own pass saves. Without late steps there is no
                # such pass, and torch.func would refuse any hooks.
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_same, _same))
                self._restore(stack)
            yield

    def _restore(self, stack: ExitStack) -> None:
        # Autocast has kept casts of parameters, by their identity.
        stack.callback(torch.clear_autocast_cache)
        torch.clear_autocast_cache()
        for module, is_training in self._modes:
            stack.callback(setattr, module, "training", module.training)
            module.training = is_training
        for module, name, buffer in self._buffers:
            stack.callback(module._buffers.__setitem__, name, module._buffers[name])
            module._buffers[name] = buffer
        for parameter in self._old:
            # `data` is exchanged, not written: a graph of the next pass may refer to the parameter already.
            stack.callback(_set_data, parameter, parameter.data)
            _set_data(parameter, self._memory[parameter])


def _set_data(parameter: nn.Parameter, data: torch.Tensor) -> None:
    parameter.data = data


def _same(value: Any) -> Any:
    return value
