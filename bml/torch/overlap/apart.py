"""Lets what is computed in the middle of somebody's forward pass not depend on that pass, nor change it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._C import _autograd, _functorch
from torch.utils._python_dispatch import _disable_current_modes

_TOP = getattr(_autograd, "_top_saved_tensors_default_hooks", None)
"""Returns the hooks that a pass has put on what it saves; PyTorch 2.7 does not tell them."""


@contextmanager
def outside_of_the_pass() -> Iterator[None]:
    """Leave inference mode, transforms of torch.func, hooks on what is saved for backward, and modes."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        if _functorch.peek_interpreter_stack() is not None:
            from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

            stack.enter_context(temporarily_clear_interpreter_stack())
        _without_hooks(stack)
        stack.enter_context(_disable_current_modes())  # of selective checkpointing, which keeps results
        yield


def _without_hooks(stack: ExitStack) -> None:
    """Take the hooks on saved tensors off, until the stack is closed: torch.func refuses to work with any.

    Those of a checkpointed module count what its own pass saves.
    """
    if _TOP is None:
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_same, _same))
        return
    while (hooks := _TOP(True)) is not None:
        _autograd._pop_saved_tensors_default_hooks()
        stack.callback(_autograd._push_saved_tensors_default_hooks, *hooks)


def _same(value: Any) -> Any:
    return value
