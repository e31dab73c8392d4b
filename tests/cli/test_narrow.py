"""What commands print on narrow terminals: nothing is cut, whatever a table holds."""

from __future__ import annotations

import io
from collections.abc import Iterator
from random import Random

import click
import pytest
from click.testing import CliRunner
from rich import box
from rich.console import Console
from rich.table import Table

from bml.cli import main
from bml.cli.tables import print_table


@pytest.mark.parametrize("case", range(100))
def test_no_word_of_a_table_is_cut(case: int, fault_seed: int) -> None:
    random = Random(fault_seed + case)
    n_columns, width = random.randint(1, 9), random.randint(14, 130)
    cells = [[_cell(random) for _ in range(n_columns)] for _ in range(random.randint(2, 5))]
    style = random.choice([box.HEAVY_HEAD, box.SIMPLE_HEAD])
    table = Table(title="what a title says", box=style, pad_edge=random.random() < 0.5)
    for head in cells[0]:
        table.add_column(head, justify=random.choice(("left", "right")), no_wrap=random.random() < 0.2)
    for row in cells[1:]:
        table.add_row(*row)
    printed = io.StringIO()
    print_table(table, Console(file=printed, width=width, markup=False))
    lines = printed.getvalue().splitlines()
    assert all(len(line) <= width for line in lines), printed.getvalue()
    seen = [word.strip(",") for line in lines for word in line.replace("│", " ").replace("┃", " ").split()]
    for word in " ".join(cell for row in cells[1:] for cell in row).split():
        seen.remove(word)  # raises ValueError if the word is not there, or not as often as in the cells


def _cell(random: Random) -> str:
    words = (
        "".join(random.choices("abz019.%-", k=random.randint(1, 11))) for _ in range(random.randint(0, 6))
    )
    return " ".join(words)


@pytest.mark.few(8)
@pytest.mark.parametrize("columns", [30, 40, 80])
@pytest.mark.parametrize(
    "command",
    [
        "plan bcube:2x2 --fail server:3",
        "plan bcube:2x2 --compare",
        "plan bcube:2x2 --survey 1",
        "sim bcube:2x2",
        "sim bcube:2x2 --compare",
        "sim bcube:2x2 --packets --bytes 64KiB",
        "sim train bcube:2x2 --model lenet --fail link:0/0",
        "sim train bcube:2x2 --model lenet --compare --prices port=2",
        "metrics list",
    ],
)
def test_tables_fit_the_terminal(command: str, columns: int) -> None:
    done = CliRunner(env={"COLUMNS": str(columns)}).invoke(main, command.split())
    assert done.exit_code == 0, done.output
    assert "…" not in done.output
    drawn = [line for line in done.output.splitlines() if set(line) & set("│┃┏└─")]
    assert all(len(line) <= columns for line in drawn), done.output


def _helps() -> Iterator[tuple[str, ...]]:
    """The words of all commands."""
    waiting: list[tuple[tuple[str, ...], click.Command]] = [((), main)]
    while waiting:
        words, command = waiting.pop()
        yield words
        below = getattr(command, "commands", {})
        waiting += [((*words, name), below[name]) for name in sorted(below)]


@pytest.mark.parametrize("words", list(_helps()), ids=" ".join)
def test_a_help_fits_eighty_columns_and_is_not_cut(words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(main, [*words, "--help"], env={"COLUMNS": "80"})
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert [line for line in lines if len(line) > 80] == []
    assert [line for line in lines[1:] if line.endswith("...")] == []
