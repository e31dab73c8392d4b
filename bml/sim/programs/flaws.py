"""The mistakes that random programs make, and the errors that name them."""

from __future__ import annotations

FLAWS: dict[str, tuple[str, ...]] = {
    "plans differ": ("StepMismatch", "UsageError"),
    "two loops in turn": ("UsageError",),
    "an old batch": ("UsageError",),
    "a batch after its loop": ("UsageError", "UnboundLocalError"),
    "a server skips a batch": ("UsageError", "StepMismatch"),
    "a server skips a call": ("StepMismatch",),
    "roots differ": ("StepMismatch",),
    "recompute raises": ("SessionBroken",),
    "changed before it is committed": ("UsageError",),
    "recompute makes a call": ("UsageError",),
    "names nothing": ("UsageError",),
}
"""The mistakes of a program, and the errors that name them. A mistake without harm has none."""
BY_SERVER = ("plans differ", "a server skips a batch", "a server skips a call", "roots differ")
"""Flaws of one server only."""
