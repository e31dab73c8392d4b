"""A function whose call runs nothing is refused; one that runs what it hides is not."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

import bml
from bml.cluster.process.bodies import check_ran
from bml.errors import UsageError


def generator(session: Any, steps: int = 3) -> Iterator[int]:
    yield steps


async def coroutine(session: Any) -> int:
    return 3


async def both(session: Any) -> AsyncIterator[int]:
    yield 3


class Trainer:
    def __call__(self, session: Any) -> Iterator[int]:
        yield 1

    async def train(self, session: Any) -> int:
        return 1


class Outer:
    def __init__(self, inner: Callable[..., Any]) -> None:
        self.__wrapped__ = inner
        self._inner = inner

    def __call__(self, *arguments: Any) -> Any:
        return self._inner(*arguments)


def hiding(function: Callable[..., Any]) -> Callable[..., Any]:
    def outer(*arguments: Any) -> Any:
        return function(*arguments)

    return outer


def handing_on(function: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(function)(hiding(function))


def running(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def outer(session: Any) -> Any:
        return asyncio.run(function(session))

    return outer


@pytest.mark.parametrize(
    ("train", "says"),
    [
        (generator, "it has a `yield`"),
        (coroutine, "it is `async def`"),
        (both, "it is `async def`"),
        (functools.partial(generator, steps=4), "it has a `yield`"),
        (functools.partial(functools.partial(coroutine)), "it is `async def`"),
        (Trainer(), "it has a `yield`"),
        (functools.partial(Trainer()), "it has a `yield`"),
        (Trainer().train, "it is `async def`"),
    ],
)
def test_it_is_refused_before_anything_is_started(train: Callable[..., Any], says: str) -> None:
    with pytest.raises(UsageError, match=f"would train nothing: {says}"):
        bml.start(train, "bcube:2x1", launcher="processes")


@pytest.mark.parametrize("decorator", [hiding, handing_on, Outer, functools.cache])
@pytest.mark.parametrize("function", [generator, coroutine, both, Trainer()])
def test_a_body_that_a_decorator_hid_is_noticed_at_the_end(
    decorator: Callable[..., Any], function: Callable[..., Any]
) -> None:
    session: Any = object()
    returned = decorator(function)(session)
    with pytest.raises(UsageError, match="trained nothing"):
        check_ran(returned, session, steps=0)


def test_what_ran_may_return_anything() -> None:
    session: Any = object()
    check_ran(running(coroutine)(session), session, steps=0)
    check_ran((number for number in range(3)), session, steps=0)
    check_ran(generator(session), session, steps=1)
    ended = generator(session)
    assert list(ended) == [3]
    check_ran(ended, session, steps=0)
    for value in (None, 3, session, (session,)):
        check_ran(value, session, steps=0)


@pytest.mark.real
@pytest.mark.timeout(60)
def test_a_job_whose_function_is_hidden_ends_with_the_reason() -> None:
    with pytest.raises(UsageError, match="trained nothing: it has a `yield`"):
        bml.launch(handing_on(generator), "bcube:2x1", launcher="processes")


@pytest.mark.real
@pytest.mark.timeout(60)
def test_a_job_whose_decorator_runs_the_coroutine_ends_well() -> None:
    assert bml.launch(running(coroutine), "bcube:2x1", launcher="processes").value == 3
