"""Writes docs/reference/commands.md from the commands themselves: `python docs/commands.py`.

tests/documents/test_commands.py fails when the page is not what this writes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click

from bml.cli import main
from bml.lab.commands.sim.command import Simulation

PAGE = Path(__file__).parent / "reference" / "commands.md"
HEAD = """\
# Commands

`python -m bml` is the same as `bml`. Every command has `-h` and `--help`. With `--json` a command prints one
JSON object and nothing else, also for an error; [Formats](formats.md) has the keys and [Errors](errors.md)
the exit statuses. A size is a number with a unit: `4KiB`, `57.5MB`, `1GiB`.
"""


def page() -> str:
    """The whole page."""
    return HEAD + "".join(part for name, command in commands("bml", main) for part in _section(name, command))


def commands(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    """A command and all below it, each with the words by which it is called."""
    yield name, command
    if isinstance(command, click.Group | Simulation):
        for below in sorted(command.commands):
            yield from commands(f"{name} {below}", command.commands[below])


def _section(name: str, command: click.Command) -> Iterator[str]:
    if name == "bml":
        return
    context = click.Context(command, info_name=name)
    yield f"\n## `{name}`\n\n```text\n{name} {' '.join(command.collect_usage_pieces(context))}\n```\n"
    yield _help(inspect.cleandoc(command.help or ""))
    options = [each for each in command.params if isinstance(each, click.Option)]
    if options:
        yield "\n| option | default | what it does |\n| --- | --- | --- |\n"
        yield from (_row(option, context) for option in options)


def _help(text: str) -> str:
    """The help text in Markdown: what is after a \\b is a block of commands."""
    parts = []
    for part in text.replace("\f", "").split("\n\n"):
        if part.startswith("\b\n"):
            lines = [line.strip() for line in part.split("\n")[1:]]
            parts.append("```text\n" + "\n".join(line for line in lines if line != "Example:") + "\n```")
        else:
            parts.append(_code(" ".join(part.split())))
    return "\n" + "\n\n".join(parts) + "\n"


def _row(option: click.Option, context: click.Context) -> str:
    value = "" if option.is_flag else " " + option.make_metavar(context).replace("|", "\\|")
    names = ", ".join(f"`{name}{value}`" for name in option.opts if "_" not in name)
    told = re.search(r"\s*\[default: (.*?)\]", option.help or "")
    known = isinstance(option.default, str | int | float) and option.default not in ("", False)
    default = told[1] if told else f"`{option.default}`" if known else ""
    text = re.sub(r"\s*\[default: .*?\]", "", option.help or "")
    kind = option.type
    limits = f" `{kind._describe_range()}`." if isinstance(kind, click.IntRange | click.FloatRange) else ""
    return f"| {names} | {default} | {_code(text)}{limits} |\n"


def _code(text: str) -> str:
    """Options as code, where they are not in backticks already."""
    parts = text.replace("|", "\\|").split("`")
    parts[::2] = [re.sub(r"(?<![\w-])(--[a-z][a-z-]*)", r"`\1`", part) for part in parts[::2]]
    return "`".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
