"""Counts the instructions of Python that a call runs: its effort, which other processes do not change."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def counted_steps(work: Callable[[], object]) -> int:
    """How many instructions of Python `work` runs; those of compiled libraries do not count."""
    n = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal n
        frame.f_trace_opcodes = True
        n += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return n
