"""What surrounds the compilation of each function: nothing, unless a program that has signals sets it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

Around = Callable[[], AbstractContextManager[None]]

_around: Around = nullcontext


def surround(context: Around) -> None:
    """Enter a context of this kind round each compilation from now on.

    LLVM calls numba back while it compiles, and what a signal's handler raises there is printed and lost: the
    program goes on, or ends with an error of numba. A function that needs others compiles them inside of its
    own compilation.
    """
    global _around
    _around = context


def around() -> AbstractContextManager[None]:
    """Make the context for one compilation."""
    return _around()
