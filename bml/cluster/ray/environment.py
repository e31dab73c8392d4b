"""Variables that only the processes of a Ray get: they inherit the environment in which it is started."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def added(settings: Mapping[str, str]) -> Iterator[None]:
    """Add variables to the environment of this process inside of this context."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
