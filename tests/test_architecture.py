"""The two rules of the house: imports point left (topology, faults, bml), and the pure part stays pure.

Read from the source, nothing is imported. A rule that is broken is reported as `file:line what`.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ORDER = ("topology", "faults", "bml")

#: Packages and modules that may not touch the world: they get time as an argument and chance from a seed.
PURE = (
    "topology",
    "faults",
    "bml.bench.fit",
    "bml.bench.rows",
    "bml.cluster.comeback",
    "bml.errors",
    "bml.protocol",
    "bml.schedule",
    "bml.sim",
    "bml.train.batches",
    "bml.train.ledger",
    "bml.train.ledgers",
    "bml.train.position",
    "bml.train.snapshot",
    "bml.train.state",
    "bml.train.vectors",
)
#: Inside them, the thin shells that do (injectors, the pytest plugin, servers in threads).
SHELLS: tuple[str, ...] = ("faults.inject", "faults.pytest_plugin", "bml.sim.programs")

IMPURE = {
    "asyncio",
    "concurrent",
    "multiprocessing",
    "os",
    "ray",
    "secrets",
    "select",
    "selectors",
    "signal",
    "socket",
    "subprocess",
    "threading",
    "time",
    "uuid",
}
#: Names of `random` and `numpy.random` that are deterministic, when they are given a seed.
SEEDED = {"Random", "Generator", "PCG64", "SeedSequence", "default_rng"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for top in ORDER for path in sorted((ROOT / top).rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in SOURCES.items()}


def within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def imports(module: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, module) of everything that is imported, by its most exact name."""
    package = module if SOURCES.get(module, Path()).name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield node.lineno, inner if inner in SOURCES else base


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def unseeded(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, call) of every use of chance that no seed decides."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.partition(".")[0]
                aliases[bound] = alias.name if alias.asname else bound
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            head, dot, rest = dotted(node.func).partition(".")
            full = aliases.get(head, head) + dot + rest
            holder, _, name = full.rpartition(".")
            seeded = name in SEEDED and bool(node.args or node.keywords)
            if holder in ("random", "numpy.random") and not seeded:
                yield node.lineno, full


def import_faults(module: str, tree: ast.AST) -> list[str]:
    """Imports that point right."""
    own = ORDER.index(module.partition(".")[0])
    tops = ((line, name.partition(".")[0]) for line, name in imports(module, tree))
    return [f"{module}:{line} imports {top}" for line, top in tops if top in ORDER and ORDER.index(top) > own]


def purity_faults(module: str, tree: ast.AST) -> list[str]:
    """What a pure module does that it may not."""
    found = []
    for line, name in imports(module, tree):
        top = name.partition(".")[0]
        pure_inside = within(name, PURE) and not within(name, SHELLS)
        if top in IMPURE or (top in ORDER and not pure_inside):
            found.append(f"{module}:{line} imports {name}")
    return found + [f"{module}:{line} calls {call} without a seed" for line, call in unseeded(tree)]


@pytest.mark.parametrize("module", SOURCES)
def test_imports_point_left(module: str) -> None:
    assert not import_faults(module, TREES[module])


# A pure module may import pure modules of ours only, so purity of each is purity of all it reaches.
@pytest.mark.parametrize(
    "module", [name for name in SOURCES if within(name, PURE) and not within(name, SHELLS)]
)
def test_pure_modules_stay_pure(module: str) -> None:
    assert not purity_faults(module, TREES[module])


def test_every_pure_package_exists() -> None:
    assert all(name in SOURCES for name in PURE)


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("import time", "imports time"),
        ("import os.path as p", "imports os.path"),
        ("def f():\n    from threading import Lock", "imports threading"),
        ("from bml.cluster import server", "imports bml.cluster.server"),
        ("from ..transport.tcp import TcpTransport", "imports bml.transport.tcp"),
        ("import random\nrandom.shuffle([])", "random.shuffle"),
        ("import random\nrandom.Random()", "random.Random"),
        ("from random import choice as c\nc([1])", "random.choice"),
        ("import numpy as np\nnp.random.default_rng()", "numpy.random.default_rng"),
        ("import numpy as np\nnp.random.permutation(3)", "numpy.random.permutation"),
        ("from numpy import random as r\nr.rand(3)", "numpy.random.rand"),
        ("from numpy.random import default_rng\ndefault_rng()", "numpy.random.default_rng"),
    ],
)
def test_the_check_finds(source: str, fault: str) -> None:
    assert [one for one in purity_faults("bml.protocol.made_up", ast.parse(source)) if fault in one]


@pytest.mark.parametrize(
    "source",
    [
        "import random\nrandom.Random(3).shuffle([])",
        "import numpy as np\nnp.random.Generator(np.random.PCG64((1, 2))).permutation(3)",
        "import numpy as np\nnp.random.default_rng(seed=1)",
        "from topology import Fabric\nfrom bml.protocol.frame import Header",
    ],
)
def test_the_check_lets_pass(source: str) -> None:
    assert not purity_faults("bml.protocol.made_up", ast.parse(source))


def test_the_check_finds_imports_that_point_right() -> None:
    assert import_faults("topology.made_up", ast.parse("import faults"))
    assert import_faults("faults.made_up", ast.parse("from bml.protocol import messages"))
    assert not import_faults("bml.made_up", ast.parse("import faults, topology"))
