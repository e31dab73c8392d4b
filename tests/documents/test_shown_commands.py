"""Commands that the explanation and the reference show can be given so; they are not run."""

from __future__ import annotations

import contextlib
import re
import shlex
from pathlib import Path

import click
import pytest
from reference_pages import ROOT, rows
from test_blocks import parsed

from bml.cli import main

PAGES = [
    page for kind in ("explanation", "reference") for page in sorted((ROOT / "docs" / kind).glob("*.md"))
]
BML = re.compile(
    r"(?:^ *|`|\$ )(?:sudo )?bml ((?:run|plan|sim|figures|check|bench|doctor|status|inject|fabric)\b[^`\n]*)",
    re.M,
)
SCRIPT = re.compile(r"(?:^ *|`|\$ )(?:sudo )?python (benchmarks/\w+\.py)([^`\n]*)", re.M)


def place(page: Path) -> str:
    return str(page.relative_to(ROOT / "docs"))


COMMANDS = [
    (place(page), found)
    for page in PAGES
    for found in BML.findall(page.read_text())
    if "…" not in found and "[" not in found
]
SCRIPTS = [(place(page), *found) for page in PAGES for found in SCRIPT.findall(page.read_text())]


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_a_command_of_bml_takes_what_a_page_gives_it(page: str, command: str) -> None:
    with contextlib.suppress(click.MissingParameter, click.BadOptionUsage):  # in a sentence, its name alone
        parsed(shlex.split(command.removesuffix("&"), comments=True))


@pytest.mark.parametrize("command", ["plan bcube:3x2 --sizes 4KiB", "plans bcube:3x2", "bench all"])
def test_a_wrong_command_is_caught(command: str) -> None:
    with pytest.raises(click.UsageError):
        parsed(shlex.split(command))


@pytest.mark.parametrize(("page", "script", "options"), SCRIPTS)
def test_a_benchmark_takes_what_a_page_gives_it(page: str, script: str, options: str) -> None:
    source = (ROOT / script).read_text()
    assert [name for name in re.findall(r"--[a-z][\w-]*", options) if f'"{name}"' not in source] == []


def test_commands_are_found() -> None:
    assert len(COMMANDS) > 50
    assert len(SCRIPTS) > 15


def test_the_exit_statuses_are_those_of_the_help() -> None:
    said = re.search(r"Exit status:(.*?)\.", main.help or "", re.DOTALL)
    assert said is not None
    shown = {row[0] for row in rows("errors.md", "Exit status of commands")}
    assert shown == set(re.findall(r"\d+", said[1]))
