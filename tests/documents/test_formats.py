"""docs/reference/formats.md has every key that the code puts into its JSON, and no other."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
from reference_pages import names, rows

from bml.cluster.launcher.result import Result
from bml.cluster.launcher.running import Job
from bml.cluster.process import training
from bml.cluster.process.coordinator import CoordinatorLoop
from bml.cluster.server import status
from bml.cluster.server.rates import Traffic
from bml.cluster.spec.job import JobSpec
from bml.cluster.torchrun import launcher as torchrun
from bml.fabric.network import EmulatedFabric
from bml.lab.bench.rows import Row
from bml.lab.bench.training import rows as training_rows
from bml.lab.commands.testbed.printed import Answer
from bml.lab.flows.training import layers
from bml.lab.flows.training.training import ViewTimes
from bml.predict.foretold import foretold
from bml.train.balancing.throughput import SizeSummary
from bml.transport.interface import LinkStats


def keys(function: Callable[..., Any], number: int = 0) -> set[str]:
    """The keys of a dict that a function writes out: of those that no other dict has in it, this one."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    outer: list[ast.Dict] = []

    def look(node: ast.AST) -> None:
        if isinstance(node, ast.Dict) and len(node.keys) > 1:
            outer.append(node)
            return
        for child in ast.iter_child_nodes(node):
            look(child)

    look(tree)
    return {str(key.value) for key in outer[number].keys if isinstance(key, ast.Constant)}


def command(module: str, name: str) -> Callable[..., Any]:
    """The function of a command of `bml`, or another of its module."""
    found = getattr(importlib.import_module(f"bml.{module}"), name)
    return getattr(found, "callback", found)  # type: ignore[no-any-return]


TABLES = {
    "The report": lambda: {*Result(JobSpec("bcube:2x2")).report},
    "A view": lambda: keys(status.view_records),
    "The throughput of a size": lambda: {*SizeSummary.__annotations__},
    "The metrics of a server": lambda: keys(training._metrics),
    "The counters of a connection": lambda: {*LinkStats._fields},
    "The status of a job": lambda: keys(Job.status, -1) | keys(foretold, -1),
    "What the coordinator says": lambda: keys(CoordinatorLoop.snapshot),
    "What a server says of itself": lambda: keys(status.status),
    "A view of `bml sim train`": lambda: {field.name for field in fields(ViewTimes)},
    "The choice of `bml sim train --compare --prices`": lambda: keys(
        command("lab.commands.sim.chosen", "chosen"), -1
    ),
    "A layer of `bml sim train --model FILE`": lambda: {*layers._KEYS},
    "A row of `bml bench allreduce`": lambda: {field.name for field in fields(Row)},
    "A row of `bml bench train`": lambda: {field.name for field in fields(training_rows.Row)},
    "A failure of `bml bench train`": lambda: {field.name for field in fields(training_rows.FailureRow)},
}


@pytest.mark.parametrize("title", TABLES)
def test_a_table_has_the_keys_of_the_code(title: str) -> None:
    assert names("formats.md", title) == TABLES[title]()


PLAN = {field.name for field in fields(importlib.import_module("bml.lab.commands.plan.command").Report)}
SIM, SIM_PACKETS, SIM_TRAIN = (
    {
        field.name
        for field in fields(getattr(importlib.import_module(f"bml.lab.commands.sim.{module}"), report))
    }
    for module, report in (("asked", "Report"), ("packets", "PacketReport"), ("trained", "TrainReport"))
)
MACHINE = {"cores", "load"}
COMMANDS = {
    "bml inject": lambda: keys(Job.inject) | {"(or fabric)"},
    "bml plan": lambda: PLAN,
    "bml sim": lambda: SIM,
    "bml sim --packets": lambda: SIM_PACKETS,
    "bml sim --compare": lambda: keys(command("lab.commands.sim.compared", "compared"), -1),
    "bml sim train": lambda: SIM_TRAIN,
    "bml sim train --compare": lambda: keys(command("lab.commands.sim.trained", "compared"), -1),
    "bml figures": lambda: keys(command("lab.commands.figures.shown", "answer"), -1),
    "bml check": lambda: {*_strings(command("cli.check", "check_command"), "keys")},
    "bml bench allreduce": lambda: keys(command("lab.commands.bench", "_answer")) | MACHINE | {"seconds"},
    "bml bench train": lambda: keys(Answer.as_json) | {"seconds"},
    "bml bench calibrate": lambda: keys(command("lab.commands.bench", "_calibration_json"), -1) | MACHINE,
    "bml torchrun": lambda: keys(torchrun._Launcher.leave),
    "bml fabric up, status, …": lambda: keys(EmulatedFabric.status),
}


def _strings(function: Callable[..., Any], name: str) -> list[str]:
    """The texts of the tuple that a function calls by this name."""
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id == name
        ):
            return list(ast.literal_eval(node.value))
    raise AssertionError(name)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_the_keys_of_the_code(name: str) -> None:
    said = next(row[1] for row in rows("formats.md", "Other commands") if row[0] == name)
    words = re.sub(r":.*| \((?!or).*?\)", "", said).replace(" (or", ", (or")
    assert {word.strip() for word in words.split(",")} == COMMANDS[name]()


def test_every_command_with_json_is_there() -> None:
    shown = {row[0] for row in rows("formats.md", "Other commands")}
    assert {"bml doctor", *COMMANDS} == shown


def test_the_traffic_of_a_nic_is_there() -> None:
    said = next(row[2] for row in rows("formats.md", "What a server says of itself") if row[0] == "nics")
    written = {"level", "address", "carrier"} | {field.name for field in fields(Traffic)}
    assert {word.strip(" .") for word in said.split(",")} == written
