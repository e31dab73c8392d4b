"""Compiles functions on arrays to machine code, with numba, and keeps what was compiled for later runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from numba import njit

from bml.lab.flows.compilation import around

_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(function: _Function) -> _Function:
    """Compile a function when it is first called.

    The machine code is kept beside the module, or in the user's cache folder. Where neither can be written,
    it is made anew in every process, which takes some seconds.
    """
    return _compiled(function)


def subroutine(function: _Function) -> _Function:
    """Compile a function that only compiled ones call: it can be compiled sooner."""
    return _compiled(function, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def inlined(function: _Function) -> _Function:
    """Compile as a part of each function that calls it, all of which are compiled: see `subroutine`."""
    return _compiled(function, no_cpython_wrapper=True, no_cfunc_wrapper=True, forceinline=True)


def _compiled(function: _Function, **options: Any) -> _Function:
    # As numpy does, a division by zero gives infinity: checks would be half of the code.
    options["error_model"] = "numpy"
    # No function makes an array, so none counts who uses it: for packets that was four fifths of the time.
    options["_nrt"] = False
    try:
        dispatcher = njit(cache=True, **options)(function)
    except RuntimeError:  # numba's way to say that it found no folder for its cache
        dispatcher = njit(**options)(function)
    dispatcher.compile = _surrounded(dispatcher.compile)
    return cast(_Function, dispatcher)


def _surrounded(compiles: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(compiles)
    def compile_(*arguments: Any) -> Any:
        with around():
            return compiles(*arguments)

    return compile_
