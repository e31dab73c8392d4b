"""Settings of the process in which tests run, and what no test may leave in it."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator

import pytest

pytest_plugins = ["gate"]

# A shell without job control starts background commands with SIGINT ignored. Their children inherit that, and
# commands under test could not be interrupted.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Commands under test print the same wherever the gate runs; pytest, for one, prints more where CI is set.
_FOR_OUTPUT = (
    "CI",
    "BUILD_NUMBER",
    "COLUMNS",
    "LINES",
    "NO_COLOR",
    "FORCE_COLOR",
    "PY_COLORS",
    "PYTEST_ADDOPTS",
)
_put_aside: dict[str, str] = {}


def pytest_configure() -> None:
    """Before any test is imported, as some take the environment then."""
    _put_aside.update({name: os.environ.pop(name) for name in _FOR_OUTPUT if name in os.environ})


def pytest_sessionfinish() -> None:
    """Restore them: the summary of this run itself may be as long as the machine wants it."""
    os.environ.update(_put_aside)


@pytest.fixture(autouse=True)
def _nobody_alive_is_missed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real tests may run beside each other: what lives and gets no core for half a second is not dead.

    A test about silence says itself how long silence lasts.
    """
    marks = {mark.name for mark in request.node.iter_markers()}
    if marks & {"real", "ray", "matrix"} and "serial" not in marks:
        monkeypatch.setenv("BML_DETECT_S", "2")


@pytest.fixture(autouse=True)
def _loggers_stay_as_they_are() -> Iterator[None]:
    """A handler that a test leaves shows the news of all later ones, perhaps twice, from another thread."""
    before = _loggers()
    yield
    assert _loggers() == before


def _loggers() -> list[tuple[str, list[logging.Handler], bool]]:
    loggers = (logging.getLogger(), logging.getLogger("bml"))
    return [(each.name, [*each.handlers], each.propagate) for each in loggers]
