"""What `bml run` says at the end of a job: views, lost servers, throughput, ledger and parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bml.cli.output import text_of_end
from bml.cli.printed import in_words, size_lines, strict_json
from bml.cli.tables import print_table
from bml.cluster.launcher.result import Result
from bml.predict.words import milliseconds

_WIDE = 120
"""On fewer columns a table would cut its heads and numbers, and wrap a reason many times."""
_TIMES = {
    "noticed_s": "noticed in",
    "recover_s": "recovered in",
    "measured_s": "a step",
    "predicted_s": "predicted",
}
"""The times of a view in its report, and their names; a time of 0 is not known."""
_FIRST = {**_TIMES, "recover_s": "first step after"}
"""The same of the first view: nothing was lost before it, so nothing recovered."""


def summarise(result: Result, console: Console) -> None:
    """Print the end of a job that ended well."""
    report = result.report
    if console.width >= _WIDE:
        print_table(_view_table(report["views"]), console)
    else:
        for line in _view_lines(report["views"]):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    for server, why in report["dead"].items():
        console.print(f"lost server {server}: {why}", highlight=False, markup=False)
    for server, why in report["left"].items():
        console.print(f"server {server} left: {why}", highlight=False, markup=False)
    console.print(f"steps committed: {report['steps']}", highlight=False)
    for line in size_lines(report["sizes"]):
        console.print(line, highlight=False, markup=False)
    for line in _ledger_lines(report["samples"]):
        console.print(line, highlight=False, markup=False)
    for line in _checkpoint_lines(report["metrics"].values()):
        console.print(line, highlight=False, markup=False)
    console.print(_parameter_line(report["digests"]), highlight=False)
    if report["nan"]:
        names = ", ".join(report["nan"][:5])
        console.print(f"{names} of the state ended with NaN in it", highlight=False, markup=False)
    if isinstance(result.value, dict):
        shown = ", ".join(f"{in_words(key)} {_short(value)}" for key, value in result.value.items())
        console.print(f"result: {shown}", highlight=False, markup=False)


def as_json_of(result: Result | None, failure: BaseException | None) -> dict[str, Any]:
    """Return the report, the values of the training functions, and the error with which the job ended."""
    whole = {} if result is None else {**result.report, "values": result.values}
    if failure is not None:
        whole["error"] = {"kind": type(failure).__name__, "text": text_of_end(failure)}
    return whole


def report_of(result: Result | None, failure: BaseException | None) -> str:
    """Return the text of the file of `--report`."""
    return strict_json(as_json_of(result, failure), indent=1)


def _short(value: Any) -> str:
    return f"{value:.4f}" if type(value) is float else in_words(value)


def _parameter_line(digests: dict[int, str]) -> str:
    """Say what the digests prove of the parameters."""
    digest = min(digests.values())
    if not digest:
        return "parameters: none were named with session.state, so nothing was compared"
    return f"parameters of {len(digests)} servers: all hold the same bits, sha256 {digest[:16]}…"


def _ledger_lines(samples: dict[str, Any] | None) -> Iterator[str]:
    """Say what the ledger proves of the samples; a line per loop that did not use all of them."""
    if samples is None:
        return
    epochs = sum(len(loop["epochs"]) for loop in samples["loops"])
    if samples["complete"]:
        yield f"ledger: every sample exactly once in each of {epochs} epochs"
        return
    for loop in samples["loops"]:
        if not loop["complete"]:
            left = loop["left_out"]
            yield f"ledger: {loop['loop']}: {loop['end']}, {left} samples of its batches left out"


def _checkpoint_lines(metrics: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Say why the last checkpoint was not written, if it was not."""
    kept = [each["checkpoints"] for each in metrics if each.get("checkpoints")]
    if error := next((each["error"] for each in kept if each["error"]), ""):
        yield f"the last checkpoint was not written: {error}"


def _view_lines(views: list[dict[str, Any]]) -> Iterator[str]:
    """A line or two for each view."""
    for view in views:
        n_servers, commit = len(view["members"]), view["commit"]
        yield f"view {view['epoch']}: {n_servers} servers, after step {commit} ({view['reason']})"
        names = _FIRST if view["epoch"] == 1 else _TIMES
        if known := [f"{what} {milliseconds(view[key])}" for key, what in names.items() if view[key]]:
            yield f"  {', '.join(known)}"


def _view_table(views: list[dict[str, Any]]) -> Table:
    table = Table(
        "view",
        "servers",
        "after step",
        *_TIMES.values(),
        "reason",
        title="views",
    )
    for view in views:
        table.add_row(
            str(view["epoch"]),
            str(len(view["members"])),
            str(view["commit"]),
            *(
                milliseconds(view[key]) if view[key] and (view["epoch"] > 1 or key != "recover_s") else "-"
                for key in _TIMES
            ),
            escape(view["reason"]),
        )
    return table
