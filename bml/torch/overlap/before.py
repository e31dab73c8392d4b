"""What a model was in a batch, kept until the batch is whole: lost samples are computed again with it.

Parameters of which the new values came sooner than those of others have their old ones here. Two layers of
which one is new and the other old would give a gradient that no single process has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from bml.topology.errors import UsageError
from bml.torch.overlap.apart import outside_of_the_pass
from bml.torch.overlap.attributes import Attributes, attributes_of, put


class Before:
    """Old values of the `trained` parameters, and buffers and attributes of modules at the end of a batch.

    Parameters that are not trained must not change until the batch is whole: they are not copied.
    """

    def __init__(self, model: nn.Module, trained: Sequence[nn.Parameter] = ()):
        self._model = model
        self._trained = {id(each) for each in trained}
        self._versions: list[tuple[str, nn.Parameter, int]] = []
        self._memory: dict[nn.Parameter, torch.Tensor] = {}
        """A copy of each parameter that was ever kept: fresh memory in every batch costs as much again."""
        self._old: list[nn.Parameter] = []
        self._buffers: list[tuple[nn.Module, str, torch.Tensor]] = []
        self._attributes: Attributes | None = None
        self.is_restored = False
        """Whether the model is now as it was: its parameters are not to be waited for."""

    def note(self) -> None:
        """A batch has ended but for the sums: keep buffers and attributes as they are, modes among them."""
        modules = list(self._model.modules())
        self._attributes = attributes_of(modules)
        self._versions = [(name, each, _version(each)) for name, each in self._untrained()]
        with torch.no_grad():
            self._buffers = [
                (module, name, buffer.detach().clone())
                for module in modules
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
        self._old, self._buffers, self._attributes, self._versions = [], [], None, []

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Let the model be what it was. The pass in which this happens, if any, must not notice.

        Raises UsageError if a parameter has changed that is not trained.
        """
        with ExitStack() as stack:
            stack.enter_context(outside_of_the_pass())
            stack.callback(setattr, self, "is_restored", self.is_restored)
            self.is_restored = True
            stack.callback(put, attributes_of(self._model.modules()))
            if self._attributes is not None:
                put(self._attributes)
                self._check_untrained()
                self._restore(stack)
            yield

    def _untrained(self) -> list[tuple[str, nn.Parameter]]:
        return [each for each in self._model.named_parameters() if id(each[1]) not in self._trained]

    def _check_untrained(self) -> None:
        now = dict(self._untrained())
        for name, parameter, version in self._versions:
            if now.get(name) is not parameter or _version(parameter) != version:
                raise UsageError(
                    f"samples of a lost server must be computed again, and the parameter {name!r}, which is "
                    "not trained, was changed since their batch: call run.synchronize() before you change it"
                )

    def _restore(self, stack: ExitStack) -> None:
        # Autocast has kept casts of parameters, by their identity.
        stack.callback(torch.clear_autocast_cache)
        torch.clear_autocast_cache()
        for module, name, buffer in self._buffers:
            stack.callback(module._buffers.__setitem__, name, module._buffers[name])
            module._buffers[name] = buffer
        for parameter in self._old:
            # `data` is exchanged, not written: a graph of the next pass may refer to the parameter already.
            stack.callback(_set_data, parameter, parameter.data)
            _set_data(parameter, self._memory[parameter])


def _set_data(parameter: nn.Parameter, data: torch.Tensor) -> None:
    parameter.data = data


def _version(parameter: nn.Parameter) -> int:
    """A number that changes whenever the values do."""
    return 0 if parameter.is_inference() else int(parameter._version)
