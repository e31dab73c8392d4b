"""Refuses training functions whose call runs nothing: generators and coroutines, which nobody starts."""

from __future__ import annotations

import inspect
from functools import partial
from types import AsyncGeneratorType, CoroutineType, FrameType, FunctionType, GeneratorType, MethodType
from typing import Any

from bml.cluster.process.pickling import Train
from bml.errors import UsageError
from bml.train.session import Session

_GENERATOR = "it has a `yield`, so a call only makes a generator: take the `yield` out of it"
_COROUTINE = (
    "it is `async def`, so a call only makes a coroutine: give a plain function, such as "
    "`def train(session): return asyncio.run(main(session))`"
)


def refuse_bodies(train: Train) -> None:
    """Raise UsageError if a call of this function, before anything is started, would run none of its lines.

    It is looked at through functools.partial, bound methods and `__call__`. It is not looked at through other
    decorators: they may run what they hide, as `asyncio.run` does. `check_ran` sees those that do not.
    """
    function = _called(train)
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise UsageError(f"the training function would train nothing: {_COROUTINE}")
    if inspect.isgeneratorfunction(function):
        raise UsageError(f"the training function would train nothing: {_GENERATOR}")


def check_ran(value: Any, session: Session, steps: int) -> None:
    """Raise UsageError if a function that made no step returned a body that holds the session.

    `steps`: those that its server has made. Any other generator is a result like others.
    """
    if steps == 0 and _holds(_frame(value), session):
        why = _GENERATOR if isinstance(value, GeneratorType) else _COROUTINE
        if not isinstance(value, AsyncGeneratorType):
            value.close()  # or Python warns that it was never awaited
        raise UsageError(f"the training function trained nothing: {why}")


def _called(train: Any) -> Any:
    """Return the function that a call of this object runs."""
    while not isinstance(train, FunctionType):
        if isinstance(train, partial):
            train = train.func
        elif isinstance(train, MethodType):
            train = train.__func__
        else:
            call = getattr(type(train), "__call__", None)  # noqa: B004 - what is looked for is its function
            return call if isinstance(call, FunctionType) and not isinstance(train, type) else train
    return train


def _frame(value: Any) -> FrameType | None:
    """Return the frame of a body that has not ended; None for any other value."""
    match value:
        case GeneratorType():
            return value.gi_frame
        case CoroutineType():
            return value.cr_frame
        case AsyncGeneratorType():
            return value.ag_frame
    return None


def _holds(frame: FrameType | None, session: Session) -> bool:
    """Whether the session is among the variables or arguments of this frame."""
    values = [] if frame is None else list(frame.f_locals.values())
    return any(
        each is session or (isinstance(each, tuple) and any(one is session for one in each))
        for each in values
    )
