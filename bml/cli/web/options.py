"""The options `--web` and `--web-inject` of `bml run` and `bml status`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from bml.cluster.launcher.running import Job
from bml.errors import UsageError

if TYPE_CHECKING:
    from bml.web.served import ServedPage

_ANY = "0"


class WithWeb(click.Command):
    """A command with `--web [PORT]`: a word after it that is no number is not taken for the port."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See click.Command."""
        return super().parse_args(ctx, [*with_port(args)])


def with_port(args: list[str]) -> Iterator[str]:
    """Give each `--web` its port."""
    for word, after in zip(args, [*args[1:], ""], strict=False):
        yield f"--web={_ANY}" if word == "--web" and not after.isdecimal() else word


def web_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the two options to a command, which takes them as `web` and `web_inject`."""
    port = click.option(
        "--web",
        type=click.IntRange(0, 65535),
        metavar="[PORT]",
        help="Show a live page of the job on 127.0.0.1, at this port. [default: a free one]",
    )
    inject = click.option("--web-inject", is_flag=True, help="Let faults be injected from the page of --web.")
    return port(inject(command))


@contextmanager
def served(port: int | None, injects: bool, say: Callable[[str], None]) -> Iterator[ServedPage | None]:
    """Serve a page meanwhile, and say where; None without a port.

    Raises FabricError if the port is taken, UsageError if faults are to be injected from no page.
    """
    if port is None:
        if injects:
            raise UsageError("--web-inject is for the page: give --web, too")
        yield None
        return
    from bml.web.served import ServedPage  # importing aiohttp takes half a second

    with ServedPage(port, injects) as page:
        say(f"page: {page.url}")
        yield page


@contextmanager
def shown(page: ServedPage | None, job: Job) -> Iterator[None]:
    """Show a job of this process meanwhile, and at last how it has ended, if it has."""
    if page is None:
        yield
        return
    page.follow(job)
    try:
        yield
    finally:
        if outcome := job.outcome():
            page.end(outcome)
