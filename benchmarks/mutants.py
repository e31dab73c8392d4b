"""Small semantic mutants of the product, one at a time, and the test that notices each.

docs/explanation/mutants.md has the results.

    python benchmarks/mutants.py mutants.jsonl --seed 1 --start 0 --count 200

Mutant number N follows from the seed, N and the tree. Each is made in a scratch copy, where the tests run
that are most likely to notice it, and the others only if those do not. A run goes on where an earlier one
stopped: numbers that are in the file already are left out. `--markdown` prints the table of a file instead.
"""

from __future__ import annotations

import argparse
import ast
import fcntl
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

WEIGHTS = {"bml/protocol": 8, "faults": 3, "bml/schedule": 2, "bml/train": 2, "bml/cluster": 3}
CHECK = "-m bml check --jobs 1 --seeds 0:200"
SHARED = "-m bml check --jobs 1 --shared-memory --seeds 0:60"
#: Tests with real processes: all of them take minutes, so one or two of every sort.
REAL = "-m pytest -x -q " + " ".join(
    f"tests/cluster/test_{name}"
    for name in (
        "recovery_processes.py::test_three_servers_and_the_coordinator_die",
        "recovery_processes.py::test_a_training_function_that_raises_on_one_server",
        "collectives_processes.py::test_a_server_that_makes_a_call_less_is_named",
        "joining_processes.py::test_lost_servers_are_started_again_if_asked_for",
        "shared_memory.py::test_the_first_server_and_the_coordinator_die",
        "shared_memory.py::test_copies_are_counted_and_own_memory_is_not_copied",
        "async_processes.py::test_over_shared_memory",
        "running_job.py::test_status_and_inject_from_python",
    )
)
NAMED = (
    "-m pytest -x -q tests/sim/test_simulation_named.py tests/sim/test_joining_runs.py "
    "tests/sim/test_endings.py"
)
#: Per package, the folder with its unit tests, and the commands that follow if those notice nothing.
STAGES = {
    "bml/protocol": ("tests/protocol", (CHECK, NAMED, SHARED)),
    "faults": ("tests/faults", (CHECK, "-m pytest -x -q tests/schedule/test_detour.py")),
    "bml/schedule": ("tests/schedule", (CHECK,)),
    "bml/train": ("tests/train", (CHECK, REAL)),
    "bml/cluster": ("tests/cluster", (REAL,)),
}
#: Tests with real processes disturb each other: one at a time on a machine.
LOCK = Path(tempfile.gettempdir()) / "real.lock"
LIMIT_S = 240.0
SLOW = re.compile(r"pytest\.mark\.(real|ray|matrix)|planted_bugs")

FLIPPED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
}  # fmt: skip
RENAMED = {"min": "max", "max": "min", "any": "all", "all": "any"}


def mutations(tree: ast.Module) -> Iterator[tuple[str, int, ast.AST, ast.AST]]:
    """Yield (kind, line, node, replacement) of every mutation of a module."""
    skipped = {id(each) for node in ast.walk(tree) for each in _untouched(node)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            skipped.update(map(id, ast.iter_child_nodes(node)))
            continue
        for kind, other in _others(node):
            yield kind, getattr(node, "lineno", 0), node, other


def _untouched(node: ast.AST) -> Iterator[ast.AST]:
    """Annotations, decorators, default values, docstrings, messages of errors, imports, aliases."""
    if isinstance(node, ast.FunctionDef):
        yield from filter(None, (node.returns, node.args, *node.decorator_list))
    elif isinstance(node, ast.ClassDef):
        yield from (*node.decorator_list, *node.bases, *node.keywords)
    elif isinstance(node, ast.AnnAssign):
        yield node.annotation
    elif isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom | ast.Assert):
        yield from ast.iter_child_nodes(node)
    elif isinstance(node, ast.Module):
        yield from (each for each in node.body if isinstance(each, ast.If | ast.Assign | ast.Expr))


def _others(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    match node:
        case ast.Compare(left, [op], comparators) if type(op) in FLIPPED:
            yield "comparison", ast.Compare(left, [FLIPPED[type(op)]()], comparators)
        case ast.BinOp(left, op, right) if type(op) in FLIPPED:
            yield "arithmetic", ast.BinOp(left, FLIPPED[type(op)](), right)
        case ast.BoolOp(op, values):
            yield "and/or", ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.UnaryOp(ast.Not(), operand):
            yield "not removed", operand
        case ast.Constant(bool() as value):
            yield "constant", ast.Constant(not value)
        case ast.Constant(int() as value):
            yield "off by one", ast.Constant(value + 1)
            yield "off by one", ast.Constant(value - 1)
        case ast.Name(name, ast.Load()) if name in RENAMED:
            yield "min/max, any/all", ast.Name(RENAMED[name], ast.Load())
        case ast.Call(func, [first, second, *rest], keywords) if _may_swap(first, second):
            yield "arguments swapped", ast.Call(func, [second, first, *rest], keywords)
        case ast.If(_, [*_, ast.Return() | ast.Raise() | ast.Continue()], []):
            yield "guard removed", ast.Pass()
        case ast.Expr(ast.Call()) | ast.AugAssign() | ast.Delete() | ast.Assign([ast.Attribute()]):
            yield "statement removed", ast.Pass()
        case ast.FunctionDef(body=[first, second, *_], returns=ast.Constant(None)):
            at = 2 if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) else 1
            fields = {name: value for name, value in ast.iter_fields(node) if name != "body"}
            if len(node.body) > at:
                yield "returned early", ast.FunctionDef(body=[*node.body[:at], ast.Return()], **fields)


def _may_swap(first: ast.expr, second: ast.expr) -> bool:
    starred = isinstance(first, ast.Starred) or isinstance(second, ast.Starred)
    return not starred and ast.dump(first) != ast.dump(second)


class Put(ast.NodeTransformer):
    """Puts `other` in the place of `node`."""

    def __init__(self, node: ast.AST, other: ast.AST):
        self.node, self.other = node, other

    def visit(self, node: ast.AST) -> ast.AST:
        return self.other if node is self.node else super().generic_visit(node)


def mutant(root: Path, seed: int, number: int) -> tuple[dict[str, object], str]:
    """Return the place and kind of mutant `number` of this seed, and the text of its module."""
    chance = random.Random(f"{seed} {number}")
    package = chance.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    found = []
    for path in sorted((root / package).glob("*.py")):
        tree = ast.parse(path.read_text())
        found += [(path, tree, *each) for each in mutations(tree)]
    kind = chance.choice(sorted({each[2] for each in found}))  # or most would be constants
    path, tree, _, line, node, other = chance.choice([each for each in found if each[2] == kind])
    before = ast.unparse(node).splitlines()[0]
    text = ast.unparse(ast.fix_missing_locations(Put(node, other).visit(tree)))
    place = {"number": number, "package": package, "place": f"{path.relative_to(root)}:{line}", "kind": kind}
    place["line"] = path.read_text().splitlines()[line - 1].strip()
    return {**place, "before": before, "after": ast.unparse(ast.fix_missing_locations(other))[:110]}, text


def stages(root: Path, package: str, place: str) -> Iterator[str]:
    """Return the commands to run: tests that name the module, the others of its folder, then the rest."""
    folder, more = STAGES[package]
    module = place.partition(":")[0].removesuffix(".py").replace("/", ".")
    files = sorted(root.glob("tests/**/test_*.py"))
    fast = [path for path in files if not SLOW.search(path.read_text()) and "fuzz" not in path.stem]
    near = [path for path in fast if module in path.read_text() or Path(place).stem in path.stem]
    rest = [path for path in fast if path not in near and str(path.relative_to(root)).startswith(folder)]
    for group in (near, rest):
        if group:
            yield "-m pytest -x -q " + " ".join(str(path.relative_to(root)) for path in group)
    yield from more


def run(root: Path, command: str) -> tuple[int | None, str]:
    """The exit status (None: it took too long) and the test that noticed."""
    if command == REAL:
        with LOCK.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return timed(root, command)
    return timed(root, command)


def timed(root: Path, command: str) -> tuple[int | None, str]:
    """`run`, while no other process is in the way."""
    uncached = ["-p", "no:cacheprovider"] if "pytest" in command else []
    process = subprocess.Popen(
        [sys.executable, *command.split(), *uncached],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return None, f"time limit in {command[:60]}"
    notable = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR", "  seed", "E  "))]
    failed = [line for line in notable if line.startswith(("FAILED", "ERROR"))] or notable
    return process.returncode, (failed or said.splitlines() or [""])[-1].strip()[:160]


def judge(root: Path, found: dict[str, object], text: str) -> dict[str, object]:
    """Put the mutant in its place in the scratch copy, run the tests, take it out again."""
    path = root / str(found["place"]).partition(":")[0]
    original, started_s = path.read_text(), time.monotonic()
    outcome, by = "survived", ""
    for now, then in ((original, text), (text, original)):
        path.write_text(then)
        for stale in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            stale.unlink()
        for command in stages(root, str(found["package"]), str(found["place"])) if now is original else ():
            status, by = run(root, command)
            if status != 0:
                outcome = "killed" if status is not None else "timed out"
                break
            by = ""
    return {**found, "outcome": outcome, "by": by, "seconds": round(time.monotonic() - started_s, 1)}


def copy() -> Path:
    """The tracked files of this tree, elsewhere."""
    root = Path(tempfile.mkdtemp(prefix="mutants-"))
    for name in subprocess.check_output(["git", "ls-files"], text=True).splitlines():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(name, root / name, follow_symlinks=False)
    return root


def markdown(lines: list[dict[str, object]]) -> str:
    """Counts, and the survivors."""
    counts = Counter((each["package"], each["outcome"]) for each in lines)
    rows = ["| package | mutants | killed | timed out | survived |", "| --- | --- | --- | --- | --- |"]
    for package in WEIGHTS:
        by = [counts[package, outcome] for outcome in ("killed", "timed out", "survived")]
        rows.append(f"| `{package}` | {sum(by)} | {by[0]} | {by[1]} | {by[2]} |")
    rows += ["", "| no. | place | line | mutation | was | becomes |", "| --- | --- | --- | --- | --- | --- |"]
    rows += [
        "| {number} | `{place}` | `{line}` | {kind} | `{before}` | `{after}` |".format(**e)
        for e in lines
        if e["outcome"] == "survived"
    ]
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--packages", nargs="*", default=list(WEIGHTS), help="Leave the others for later.")
    parser.add_argument("--markdown", action="store_true")
    given = parser.parse_args()
    lines = [json.loads(line) for line in given.file.read_text().splitlines()] if given.file.exists() else []
    if given.markdown:
        print(markdown(lines))
        return
    root, known = copy(), {line["number"] for line in lines}
    for number in range(given.start, given.start + given.count):
        found, text = mutant(root, given.seed, number)
        if number not in known and found["package"] in given.packages:
            line = judge(root, found, text)
            with given.file.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(line["number"], line["outcome"], line["place"], line["kind"], line["seconds"], flush=True)
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
