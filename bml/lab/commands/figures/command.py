"""`bml figures`: computes figures of the papers, and puts the published values beside ours."""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from bml.cli.output import current
from bml.lab.commands.sim.options import check_numba
from bml.topology import UsageError


@click.command()
@click.argument("name", default="all")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default="figures",
    show_default=True,
    help="Folder for NAME.svg and NAME.json of each figure; made if it is not there.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def figures(name: str, out: Path, as_json: bool) -> None:
    """Compute the figures of the papers, beside the published values.

    NAME is one figure, or all of them: that takes two minutes. Each is written into a folder as NAME.svg and
    NAME.json when all have been computed. Values are from theory or from simulation, as `bml plan` and
    `bml sim` have them; the last table says what cannot be had. It needs numba and matplotlib.

    \b
    Example:
      bml figures
      bml figures hips-reductions --out /tmp/figures
      bml figures failure-schedule --json
    """
    check_numba()
    from bml.lab.bench.plot import pyplot
    from bml.lab.commands.figures.shown import answer, rendered, show, write
    from bml.lab.figures import available  # noqa: F401 (registers the figures)
    from bml.lab.figures.figure import chosen

    pyplot()
    wanted = chosen(name)
    check_folder(out)
    start_s = time.perf_counter()
    made = []
    for number, figure in enumerate(wanted, 1):
        click.echo(f"{number} of {len(wanted)}: {figure.name}: {figure.title}", err=True)
        made.append(rendered(figure))
    files = write(made, out)
    click.echo(f"{len(files)} files in {out.resolve()}", err=True)
    if as_json:
        current().answer(answer(made, files, time.perf_counter() - start_s))
    else:
        show(made)


def check_folder(folder: Path) -> None:
    """Raise UsageError if files cannot be written into a folder. It is not made yet."""
    above = folder.absolute()
    try:
        while not (above.exists() or above.is_symlink()):
            above = above.parent
    except OSError as error:
        raise UsageError(f"--out {folder} cannot be used: {error.strerror or error}") from None
    try:
        # Only a trial tells: /proc has the permissions, and no folder can be made in it.
        TemporaryDirectory(prefix=".figures-", dir=above).cleanup()
    except OSError as error:
        why = f"may not be written ({error.strerror or error})" if above.is_dir() else "is no folder"
        raise UsageError(f"--out {folder} cannot be used, as {above} {why}: choose another folder") from None
