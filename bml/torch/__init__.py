"""bml in PyTorch: training on a session, and process groups of torch.distributed that outlive their ranks.

`import bml.torch` makes `torch.distributed.init_process_group("bml")` known.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

try:
    import torch as _torch  # noqa: F401
except ImportError as _error:
    raise ImportError("bml.torch needs PyTorch: pip install 'bml[torch]'") from _error

from bml.torch.backend import register

if TYPE_CHECKING:
    from bml.torch.attached.run import Run, attach
    from bml.torch.attached.share import Share
    from bml.torch.checkpoints.convert import export_checkpoint, import_checkpoint
    from bml.torch.group_info import contributors, is_writer
    from bml.torch.process_group import ProcessGroup
    from bml.torch.recomputing.hook import RecomputeHook, recompute_hook
    from bml.torch.resuming import Resumable, resumable

__all__ = [
    "ProcessGroup",
    "RecomputeHook",
    "Resumable",
    "Run",
    "Share",
    "attach",
    "contributors",
    "export_checkpoint",
    "import_checkpoint",
    "is_writer",
    "recompute_hook",
    "resumable",
]

_HOMES = {
    "ProcessGroup": "bml.torch.process_group",
    "RecomputeHook": "bml.torch.recomputing.hook",
    "Resumable": "bml.torch.resuming",
    "Run": "bml.torch.attached.run",
    "Share": "bml.torch.attached.share",
    "attach": "bml.torch.attached.run",
    "contributors": "bml.torch.group_info",
    "export_checkpoint": "bml.torch.checkpoints.convert",
    "import_checkpoint": "bml.torch.checkpoints.convert",
    "is_writer": "bml.torch.group_info",
    "recompute_hook": "bml.torch.recomputing.hook",
    "resumable": "bml.torch.resuming",
}
"""Where public names are defined."""


def __getattr__(name: str) -> Any:
    """Import a public name when it is used first."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_HOMES[name]), name)
    return value


register()
