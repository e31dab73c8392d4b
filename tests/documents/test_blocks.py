"""Every code block that a user reads does what the page says; see blocks.py for how pages say it."""

from __future__ import annotations

import contextlib
import re
import shlex
from pathlib import Path

import click
import pytest
from blocks import CONDITIONS, SHOWN, Block, blocks_of, missing, read
from reader import ROOT, Reader, cannot

from bml.cli import main as command_line
from bml.cli.web.options import WithWeb, with_port
from bml.lab.commands.sim.command import Simulation

PAGES = [ROOT / "README.md", ROOT / "docs" / "tutorial.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]
BLOCKS = [block for page in PAGES for block in read(page, ROOT)]
NOT_RUN = [block for block in BLOCKS if block.reason or block.marker in CONDITIONS]
WITH_RAY = {"README.md", "docs/guides/ray.md"}


def marks_of(page: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.ray] * (page in WITH_RAY)


@pytest.mark.real
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=marks_of(page)) for page in dict.fromkeys(block.page for block in BLOCKS)],
)
def test_the_blocks_of_a_page_do_what_it_says(page: str, tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    for block in BLOCKS:
        if block.page == page and not cannot(block):
            reader.do(block)


@pytest.mark.few(1)
@pytest.mark.parametrize("block", NOT_RUN, ids=lambda block: block.place)
def test_a_block_that_is_not_run_says_why(block: Block) -> None:
    """With `pytest -ra`, as here, the summary lists these blocks and their reasons."""
    if why := cannot(block):
        pytest.skip(f"{block.place}: {why}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_of_a_known_kind(page: Path) -> None:
    found = read(page, ROOT)
    assert not [f"{block.place} {block.language!r} {block.marker!r}" for block in found if not block.is_sound]
    fences = re.findall(r"^ *```", page.read_text(), re.MULTILINE)
    assert len(fences) == 2 * len(found), "a fence is indented, or not closed"
    assert page.read_text().count("<!-- block:") == sum(bool(block.marker) for block in found)


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.language == "python"], ids=lambda block: block.place
)
def test_programs_are_python(block: Block) -> None:
    compile(f"{block.set_up}\n{block.text}", block.place, "exec")


def called() -> list[tuple[str, list[str]]]:
    """Every `bml …` of the pages, run or not: where it stands, and its arguments."""
    found = []
    for block in BLOCKS:
        for command, _ in block.commands:
            words = shlex.split(re.split(r"\s(?:[|&>]|2>)", command)[0], comments=True)
            while words and (words[0] == "sudo" or "=" in words[0]):
                words.pop(0)
            if words and Path(words[0]).name == "bml":
                found.append((f"{block.place} {command}", words[1:]))
    return found


CALLED = called()


def parsed(arguments: list[str]) -> None:
    """Raises what click says of options and arguments that the command does not take; runs nothing."""
    command: click.Command = command_line
    context = click.Context(command)
    while isinstance(command, click.Group):
        first = next((word for word in arguments if not word.startswith("-")), None)
        if first is None:
            break
        found = command.get_command(context, first)
        if found is None:
            raise click.UsageError(f"there is no command {first}")
        arguments = [word for index, word in enumerate(arguments) if index != arguments.index(first)]
        command = found
    if isinstance(command, Simulation) and arguments[:1] == ["train"]:
        command, arguments = command.commands["train"], arguments[1:]
    context = click.Context(command, info_name=command.name)
    words = [*with_port(arguments)] if isinstance(command, WithWeb) else list(arguments)
    options, _, order = command.make_parser(context).parse_args(words)
    for parameter in click.core.iter_params_for_processing(order, command.get_params(context)):
        is_path = isinstance(parameter.type, click.Path | click.File)
        with contextlib.nullcontext() if not is_path else contextlib.suppress(click.BadParameter):
            parameter.handle_parse_result(context, options, [])


@pytest.mark.parametrize("arguments", [each for _, each in CALLED], ids=[place for place, _ in CALLED])
def test_commands_of_bml_take_what_a_page_gives_them(arguments: list[str]) -> None:
    parsed(arguments)


def test_the_readme_is_read_in_three_minutes() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


# --- the mechanism itself --------------------------------------------------------------------------

PAGE = """
Words.

```console
$ echo one; echo "two  three"
one
two three
$ false || echo took 12 ms
took 3.5 ms
```

<!-- block: not run: it needs a cable -->

```sh
bml run train.py
```

<!-- block: after
x = 1
-->
```python
print(x)
```
"""


def test_a_page_is_read_in_order() -> None:
    first, second, third = blocks_of("page.md", PAGE)
    assert [command for command, _ in first.commands] == [
        'echo one; echo "two  three"',
        "false || echo took 12 ms",
    ]
    assert (first.line, first.place) == (5, "page.md:5")
    assert second.reason == "it needs a cable"
    assert (third.marker, third.set_up) == ("after", "x = 1")
    assert all(block.is_sound for block in (first, second, third))


@pytest.mark.parametrize("marker", ["not run:", "needs luck", "ends with an error"])
def test_a_marker_without_meaning_is_refused(marker: str) -> None:
    (block,) = blocks_of("page.md", f"<!-- block: {marker} -->\n```sh\ntrue\n```\n")
    assert not block.is_sound


def test_a_language_that_nobody_runs_is_refused() -> None:
    (block,) = blocks_of("page.md", "```\nbml run train.py\n```\n")
    assert not block.is_sound
    assert "text" in SHOWN


@pytest.mark.parametrize(
    ("promised", "printed"),
    [
        ("a\nb", "a\nx\nb"),
        ("a  b", " a b "),
        ("view 2: … (server 4)\n…\nend", "view 2: 8 servers (server 4)\nmore\nend"),
        ("noticed in 20 ms", "noticed in 1.5 ms"),
        ("sha256 f9cb213d6ab6b415…", "sha256 0123456789abcdef…"),
    ],
)
def test_what_was_promised_was_printed(promised: str, printed: str) -> None:
    assert not missing(promised, printed)


@pytest.mark.parametrize(
    ("promised", "printed", "lacking"),
    [
        ("a\nb", "b\na", "b"),
        ("8 servers", "9 servers", "8 servers"),
        ("took 3 ms", "took 3 s", "took 3 ms"),
        ("steps: 70", "steps: 7", "steps: 70"),
    ],
)
def test_what_was_not_printed_is_said(promised: str, printed: str, lacking: str) -> None:
    assert missing(promised, printed) == lacking


def test_a_page_that_is_wrong_is_caught(tmp_path: Path) -> None:
    wrong = "```console\n$ echo one\ntwo\n```\n```sh\nfalse\n```\n```python\nraise SystemExit(3)\n```\n"
    for block in blocks_of("page.md", wrong):
        with pytest.raises(AssertionError, match=rf"page\.md:{block.line}"):
            Reader(tmp_path).do(block)


def test_a_page_does_what_it_shows(tmp_path: Path) -> None:
    text = PAGE + "```python\n# made.py\nprint('made')\n```\n```console\n$ python made.py\nmade\n```\n"
    for block in blocks_of("page.md", text):
        if not cannot(block):
            Reader(tmp_path).do(block)


@pytest.mark.parametrize(
    "arguments", [["run", "--fast", "train.py"], ["run"], ["plan", "--bytes"], ["fabric", "op"]]
)
def test_a_wrong_command_is_caught(arguments: list[str]) -> None:
    with pytest.raises(click.UsageError):
        parsed(arguments)
