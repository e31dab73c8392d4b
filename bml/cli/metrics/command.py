"""`bml metrics`: the table of all metrics, and the Grafana dashboard of a job."""

from __future__ import annotations

import shutil
import textwrap
from dataclasses import asdict
from pathlib import Path

import click

from bml.cli.output import current
from bml.cli.printed import check_writable, strict_json, write_file
from bml.metrics.dashboard import dashboard
from bml.metrics.table import TABLE


@click.group()
def metrics() -> None:
    """Show the metrics of a job, and make their dashboard for Grafana.

    `bml run --metrics 9400` serves them to Prometheus while the job runs.

    \b
    Example:
      bml metrics list
      bml metrics dashboard bml.json
    """


@metrics.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def list_metrics(as_json: bool) -> None:
    """List all metrics: name, kind, unit, labels, meaning."""
    if as_json:
        current().answer({"metrics": [asdict(metric) | {"labels": metric.all_labels} for metric in TABLE]})
        return
    width = min(100, shutil.get_terminal_size().columns)
    for metric in TABLE:
        click.echo(f"{metric.name}{{{', '.join(metric.all_labels)}}}: {metric.kind}, {metric.unit}")
        click.echo(textwrap.fill(metric.help, width, initial_indent="    ", subsequent_indent="    "))


@metrics.command("dashboard")
@click.argument("file", required=False, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--ray", "on_ray", is_flag=True, help="For the metrics at Ray's endpoint (--metrics ray).")
def make_dashboard(file: Path | None, on_ray: bool) -> None:
    """Write the dashboard as the JSON that Grafana imports.

    It goes to FILE, else to standard output.
    """
    text = strict_json(dashboard(on_ray), indent=1)
    if file is None:
        click.echo(text)
        return
    check_writable(file, "the dashboard")
    write_file(file, text + "\n")
