"""bml in PyTorch: process groups of torch.distributed whose collectives survive the loss of ranks."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

try:
    import torch as _torch  # noqa: F401
except ImportError as _error:
    raise ImportError("bml.torch needs PyTorch: pip install 'bml[torch]'") from _error

if TYPE_CHECKING:
    from bml.torch.process_group import ProcessGroup

__all__ = ["ProcessGroup"]

_HOMES = {
    "ProcessGroup": "bml.torch.process_group",
}
"""Where public names are defined."""


def __getattr__(name: str) -> Any:
    """Import a public name when it is used first."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_HOMES[name]), name)
    return value
