"""The rules of the house: imports point to rooms before one's own, never in a circle; pure parts stay pure.

The folders topology/ and faults/ are imported, and installed, as bml.topology and bml.faults.

Read from the source, nothing is imported. A rule that is broken is reported as `file:line what`.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import judged_durations
import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("topology", "faults", "bml")

#: A module imports from its own room and from rooms in lines before; rooms in one line are independent.
ROOMS = (
    ("bml.topology",),
    ("bml.faults",),
    ("bml.errors",),
    ("bml.schedule.ir",),
    ("bml.schedule.algorithms", "bml.schedule.bounds"),
    ("bml.schedule.packed",),
    ("bml.schedule.select",),
    ("bml.schedule",),
    ("bml.predict",),
    ("bml.protocol.timeouts", "bml.protocol.wire"),
    ("bml.protocol.step",),
    ("bml.protocol.server", "bml.protocol.coordinator"),
    ("bml.protocol.record",),
    ("bml.protocol",),
    ("bml.metrics",),
    ("bml.io",),
    ("bml.sharedmem",),
    ("bml.transport.interface",),
    ("bml.transport.stream",),
    ("bml.transport.handshake",),
    ("bml.transport.links",),
    ("bml.transport.tcp", "bml.transport.verbs"),
    ("bml.transport.choice",),
    ("bml.transport",),
    ("bml.fabric", "bml.train"),
    ("bml.cluster.spec", "bml.cluster.injection"),
    ("bml.cluster.steps",),
    ("bml.cluster.server",),
    ("bml.cluster.process",),
    ("bml.cluster.formation",),
    ("bml.cluster.fleets",),
    ("bml.cluster.ray",),
    ("bml.cluster.emulated",),
    ("bml.cluster.launcher",),
    ("bml.cluster.torchrun",),
    ("bml.cluster",),
    ("bml.torch",),
    ("bml.sim.judge", "bml.sim.mishaps.chaos"),
    ("bml.sim.world",),
    ("bml.sim.server",),
    ("bml.sim.mishaps",),
    ("bml.sim.simulation",),
    ("bml.sim.check", "bml.sim.exhaustive"),
    ("bml.sim.programs",),
    ("bml.sim",),
    ("bml.web",),
    ("bml.cli", "bml.pytest_plugin"),
    ("bml",),
    ("bml.lab.flows",),
    ("bml.lab.survey",),
    ("bml.lab.packets",),
    ("bml.lab.figures",),
    ("bml.lab.bench",),
    ("bml.lab.commands",),
    ("bml.lab",),
)

#: Packages and modules that may not touch the world: they get time as an argument and chance from a seed.
PURE = (
    "bml.topology",
    "bml.faults",
    "bml.lab.bench.failing",
    "bml.lab.bench.fit",
    "bml.lab.bench.rows",
    "bml.lab.bench.training.asked",
    "bml.lab.bench.training.predicted",
    "bml.lab.bench.training.rows",
    "bml.lab.bench.training.work",
    "bml.cluster.fleets.drains",
    "bml.cluster.fleets.start_quorum",
    "bml.cluster.fleets.placement",
    "bml.cluster.fleets.racks",
    "bml.cluster.fleets.shortage",
    "bml.cluster.fleets.spare_places",
    "bml.cluster.formation.point_to_point",
    "bml.cluster.launcher.start_backoff",
    "bml.cluster.launcher.restarts",
    "bml.cluster.ray.watching.absence",
    "bml.cluster.spec.leaving",
    "bml.cluster.torchrun.layout",
    "bml.cluster.torchrun.lines",
    "bml.cluster.torchrun.nodes",
    "bml.cluster.torchrun.ranks",
    "bml.cluster.torchrun.strikes",
    "bml.errors",
    "bml.lab.figures",
    "bml.lab.flows",
    "bml.metrics",
    "bml.lab.packets",
    "bml.predict",
    "bml.protocol",
    "bml.schedule",
    "bml.sim",
    "bml.lab.survey",
    "bml.torch.attached.layout",
    "bml.torch.recomputing.plan",
    "bml.train.balancing.shown",
    "bml.train.balancing.stopwatch",
    "bml.train.balancing.throughput",
    "bml.train.balancing.weights",
    "bml.train.batches",
    "bml.train.bfloat16",
    "bml.train.keeping.parts",
    "bml.train.ledger",
    "bml.train.ledgers",
    "bml.train.operations.given",
    "bml.train.operations.outputs",
    "bml.train.operations.parcel",
    "bml.train.operations.places",
    "bml.train.position",
    "bml.train.priority.order",
    "bml.train.snapshot",
    "bml.train.state",
    "bml.train.vectors",
    "bml.web.access",
    "bml.web.board",
    "bml.web.faults",
    "bml.web.layout",
    "bml.web.model",
    "bml.web.parts",
    "bml.web.words",
)
#: Inside them, the thin shell that does (servers in threads).
SHELLS: tuple[str, ...] = ("bml.sim.programs",)

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
    parts = parts if parts[0] == "bml" else ("bml", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {
    module_name(path): path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
    if folder != "bml" or path.relative_to(ROOT).parts[1] not in FOLDERS  # links to the other two
}


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(SOURCES[module].read_text())


@cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Itself and all below it: a dozen tests look at each tree."""
    return tuple(ast.walk(tree))


def trees() -> Iterator[tuple[str, ast.Module]]:
    return ((module, tree_of(module)) for module in SOURCES)


def within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def imports(module: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, module) of everything that is imported, by its most exact name."""
    package = module if SOURCES.get(module, Path()).name == "__init__.py" else module.rpartition(".")[0]
    for node in nodes(tree):
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
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.partition(".")[0]
                aliases[bound] = alias.name if alias.asname else bound
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in nodes(tree):
        if isinstance(node, ast.Call):
            head, dot, rest = dotted(node.func).partition(".")
            full = aliases.get(head, head) + dot + rest
            holder, _, name = full.rpartition(".")
            seeded = name in SEEDED and bool(node.args or node.keywords)
            if holder in ("random", "numpy.random") and not seeded:
                yield node.lineno, full


def import_faults(module: str, tree: ast.AST) -> list[str]:
    """Imports of rooms that come later, or stand in the same line."""
    (room, layer), found = room_of(module), []
    for line, name in imports(module, tree):
        its_room, its_layer = room_of(name)
        if its_room != room and its_layer >= layer:
            found.append(f"{module}:{line} imports {name}")
        elif within(name, FOLDERS[:2]):
            found.append(f"{module}:{line} imports {name}: say bml.{name}")
    return found


@cache
def room_of(module: str) -> tuple[str, int]:
    """The room of a module and the line of ROOMS that has it; ("", -1) for what is not ours."""
    held = [(room, at) for at, line in enumerate(ROOMS) for room in line if within(module, (room,))]
    return max(held, key=lambda each: len(each[0]), default=("", -1))


def purity_faults(module: str, tree: ast.AST) -> list[str]:
    """What a pure module does that it may not."""
    found = []
    for line, name in imports(module, tree):
        top = name.partition(".")[0]
        pure_inside = within(name, PURE) and not within(name, SHELLS)
        if top in IMPURE or (top == "bml" and not pure_inside):
            found.append(f"{module}:{line} imports {name}")
    return found + [f"{module}:{line} calls {call} without a seed" for line, call in unseeded(tree)]


def test_imports_point_to_rooms_before() -> None:
    assert not [each for module, tree in trees() for each in import_faults(module, tree)]


def defined(tree: ast.Module) -> set[str]:
    """The names that the statements of a module bind."""
    found: set[str] = set()
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                found |= {alias.asname or alias.name for alias in names}
            case ast.Assign() | ast.AnnAssign():
                found |= {each.id for each in nodes(node) if isinstance(each, ast.Name)}
    return found


def missing_in_text(text: str) -> list[str]:
    """Modules and names of ours that a text imports, or is the name of, and that do not exist."""
    if re.fullmatch(r"bml(\.[a-z]\w*)+", text):
        holder, _, name = text.rpartition(".")
        exists = text in SOURCES or (holder in SOURCES and name in defined(tree_of(holder)))
        return [] if exists else [text]
    if "import" not in text or "bml" not in text:
        return []
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and within(node.module, ("bml",)):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names = {alias.name for alias in node.names if within(alias.name, ("bml",)) and "." in alias.name}
        else:
            continue
        found += [each for name in sorted(names) for each in missing_in_text(name)]
    return found


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in nodes(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def test_what_texts_import_exists() -> None:
    """The entries of child processes are texts, which no type checker reads."""
    missing = [
        f"{module}:{line} {name}"
        for module, tree in trees()
        for line, text in texts(tree)
        for name in missing_in_text(text)
    ]
    assert not missing


def test_missing_modules_are_found_in_texts() -> None:
    assert missing_in_text("from bml.cluster import machines; machines.main()")
    assert missing_in_text("import bml.made_up")
    assert missing_in_text("bml.lab.bench.made_up")
    assert not missing_in_text("from bml.cluster.fleets import machines\nfrom bml.errors import BmlError")
    assert not missing_in_text("bml.schedule.plan")


def circles(arrows: dict[str, set[str]]) -> set[frozenset[str]]:
    """The sets of modules of which each reaches all others, and itself, along imports."""

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        ahead = [start]
        while ahead:
            new = arrows.get(ahead.pop(), set()) - found
            found |= new
            ahead += new
        return found

    all_reached = {module: reached(module) for module in arrows}
    return {
        frozenset(other for other in ahead if module in all_reached.get(other, ()))
        for module, ahead in all_reached.items()
        if module in ahead
    }


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Not even where only types are checked, or inside of functions."""
    arrows = {
        module: {name for _, name in imports(module, tree) if name in SOURCES} for module, tree in trees()
    }
    assert not circles(arrows)


def test_circles_are_found() -> None:
    arrows = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"e"}}
    assert circles(arrows) == {frozenset("bc"), frozenset("e")}


def test_pure_modules_stay_pure() -> None:
    pure = [name for name in SOURCES if within(name, PURE) and not within(name, SHELLS)]
    assert not [each for module in pure for each in purity_faults(module, tree_of(module))]


def test_every_room_and_every_pure_package_exists() -> None:
    assert all(name in SOURCES for name in PURE + SHELLS)
    assert all(room in SOURCES for line in ROOMS for room in line)


def test_rooms_are_small() -> None:
    modules = [name for name, path in SOURCES.items() if path.name != "__init__.py"]
    for room in {name.rpartition(".")[0] for name in modules}:
        assert sum(name.rpartition(".")[0] == room for name in modules) <= 15, room


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("import time", "imports time"),
        ("import os.path as p", "imports os.path"),
        ("def f():\n    from threading import Lock", "imports threading"),
        ("from bml.cluster.server import loop", "imports bml.cluster.server.loop"),
        ("from ..transport.tcp import transport", "imports bml.transport.tcp.transport"),
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
        "from bml.topology import Fabric\nfrom bml.protocol.wire.frame import Header",
    ],
)
def test_the_check_lets_pass(source: str) -> None:
    assert not purity_faults("bml.protocol.made_up", ast.parse(source))


def test_the_check_finds_imports_that_point_on() -> None:
    assert import_faults("bml.topology.made_up", ast.parse("import bml.faults"))
    assert import_faults("bml.faults.made_up", ast.parse("from bml.protocol.wire import messages"))
    assert import_faults("bml.protocol.server.made_up", ast.parse("import bml.protocol.coordinator.core"))
    assert not import_faults("bml.protocol.server.made_up", ast.parse("import bml.protocol.server.core"))
    assert import_faults("bml.io.made_up", ast.parse("from bml.sharedmem import segment"))
    assert not import_faults("bml.made_up", ast.parse("import bml.faults, bml.topology"))
    assert import_faults("bml.made_up", ast.parse("import topology")), "that may be somebody else's"


MOST_MODULE_LINES, MOST_FUNCTION_LINES, MOST_PARAMETERS = 400, 60, 8
MOST_CORE_LINES = 1000
"""A core is one idea on one page."""
CORES = ("bml.protocol", "bml.sim")


def too_large(module: str, text: str, tree: ast.Module | None = None) -> list[str]:
    """Modules, functions and constructors that are larger than a reader can hold in mind."""
    found = []
    if text.count("\n") > (MOST_CORE_LINES if module.startswith(CORES) else MOST_MODULE_LINES):
        found.append(f"{module}: {text.count(chr(10))} lines")
    for node in nodes(tree or ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0].lineno  # options of a command are a table above it, and no part of it
            lines = (node.end_lineno or first) - first + 1
            if lines > MOST_FUNCTION_LINES:
                found.append(f"{module}:{node.lineno} {node.name} has {lines} lines")
            n_parameters = len(node.args.args) + len(node.args.kwonlyargs) - 1
            if node.name == "__init__" and n_parameters > MOST_PARAMETERS:
                found.append(f"{module}:{node.lineno} a constructor of {n_parameters} parameters")
    return found


def test_modules_functions_and_constructors_are_small() -> None:
    found = [too_large(module, SOURCES[module].read_text(), tree) for module, tree in trees()]
    assert not [each for faults in found for each in faults]


def test_the_check_finds_what_is_too_large() -> None:
    assert too_large("made_up", "x = 1\n" * 401)
    assert not too_large("bml.protocol.made_up", "x = 1\n" * 401)
    assert too_large("bml.protocol.made_up", "x = 1\n" * 1001)
    assert too_large("made_up", "def f():\n" + "    x = 1\n" * 61)
    assert too_large(
        "made_up", f"class A:\n    def __init__(self, {', '.join('abcdefghi')}):\n        pass\n"
    )
    assert not too_large(
        "made_up", f"class A:\n    def __init__(self, {', '.join('abcdefgh')}):\n        pass\n"
    )


def unexplained(module: str, text: str, tree: ast.Module | None = None) -> list[str]:
    """The durations of a module that do not say beside them why they are so long."""
    lines, body, found = text.splitlines(), (tree or ast.parse(text)).body, []
    for node, after in zip(body, [*body[1:], None], strict=True):
        if not isinstance(node, ast.Assign):
            continue
        names = {each.id for each in ast.walk(node.targets[0]) if isinstance(each, ast.Name)}
        told = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        above, own = lines[node.lineno - 2].strip() if node.lineno > 1 else "", lines[node.lineno - 1]
        is_told = told or "#" in own or above.startswith("#")
        if not is_told and any(re.fullmatch(r"_?[A-Z0-9_]+_S", name) for name in names):
            found.append(f"{module}:{node.lineno} {', '.join(sorted(names))} does not say why")
    return found


def test_each_duration_of_the_runtime_says_why_it_is_so_long() -> None:
    runtime = [each for each in trees() if not within(each[0], ("bml.lab",))]
    found = [unexplained(module, SOURCES[module].read_text(), tree) for module, tree in runtime]
    assert len(runtime) > 500
    assert not [each for faults in found for each in faults]


def test_the_check_finds_durations_without_a_reason() -> None:
    assert unexplained("m", "_WAIT_S = 2.0\nN = 3\n") == ["m:1 _WAIT_S does not say why"]
    told = ("_WAIT_S = 2.0  # as long as a view", "# In seconds.\n_WAIT_S = 2.0", '_WAIT_S = 2.0\n"""Why."""')
    assert not [fault for text in told for fault in unexplained("m", text)]


def described_late(module: str, tree: ast.AST) -> list[str]:
    """Types that msgspec looks into when they are first decoded, and not at the import.

    It keeps what it found with the type before that is whole, so a second thread that decodes the first value
    of a type at the same time ends the process by SIGSEGV (msgspec 0.22).
    """
    found = []
    for function in nodes(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            for node in nodes(function):
                if isinstance(node, ast.Call):
                    named = {each.arg for each in node.keywords}
                    name = dotted(node.func)
                    is_typed = name.endswith("decode") and "type" in named
                    if is_typed or name.endswith((".Decoder", "msgspec.convert")):
                        found.append(f"{module}:{node.lineno} make a Decoder of the module")
    return found


def test_what_is_decoded_is_described_at_the_import() -> None:
    assert not [each for module, tree in trees() for each in described_late(module, tree)]


def test_the_check_finds_types_that_are_described_late() -> None:
    assert described_late("made_up", ast.parse("def f(b):\n    return msgspec.json.decode(b, type=T)"))
    assert described_late("made_up", ast.parse("def f(b):\n    return msgspec.json.Decoder(T).decode(b)"))
    assert described_late("made_up", ast.parse("def f(b):\n    return msgspec.convert(b, T)"))
    assert not described_late("made_up", ast.parse("_decode = msgspec.json.Decoder(T).decode"))
    assert not described_late("made_up", ast.parse("def f(b):\n    return msgspec.json.decode(b)"))


def left_held(module: str, tree: ast.Module) -> list[str]:
    """Where a lock is made that a KeyboardInterrupt in the main thread may leave held for ever."""
    return [
        f"{module}:{node.lineno} take that of bml.io.interruptible"
        for node in nodes(tree)
        if isinstance(node, ast.Attribute)
        and dotted(node) in ("threading.Condition", "threading.Event", "threading.Semaphore")
    ]


def test_no_interrupt_leaves_a_lock_held() -> None:
    """The simulator is left out: Ctrl-C ends it, and nothing is to be ended in order."""
    found = [
        each
        for module, tree in trees()
        if not module.startswith("bml.sim")
        for each in left_held(module, tree)
    ]
    assert not found


def test_the_check_finds_locks_that_may_stay_held() -> None:
    assert left_held("made_up", ast.parse("a = threading.Event()"))
    assert left_held("made_up", ast.parse("def f(a: threading.Condition): pass"))
    assert not left_held("made_up", ast.parse("a, b = threading.Lock(), Event()"))


def test_no_test_beside_others_judges_a_duration() -> None:
    """Others run beside it on the same cores. Ask for an order, a cause or a number; else mark it serial."""
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for line in judged_durations.judged(path.read_text())
    ]
    advice = "assert an order, a cause or a number, or mark the test serial with the reason"
    assert found == [], f"{advice}: {' '.join(found)}"


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("def test():\n    a = time.monotonic()\n    assert time.monotonic() - a < 5", [3]),
        (
            "def test():\n    a = perf_counter()\n    b = perf_counter() - a\n    assert 3 > 2 * b",
            [4],
        ),
        ("def f():\n    return time.time() - begun\n\ndef test():\n    assert max(f(), 1) <= 2.0", [5]),
        ("LIMIT = 3\ndef test():\n    took = time.time() - 1\n    assert 0 < took < LIMIT", [4]),
        ("@pytest.mark.real\ndef test():\n    assert view['noticed_s'] < 1.5", [3]),
        ("pytestmark = [pytest.mark.real]\ndef test():\n    assert max(gaps) < LIMIT", [3]),
        ("def test():\n    assert simulated['noticed_s'] < 1.5", []),
        ("@pytest.mark.serial('a rate')\ndef test():\n    assert time.time() - a < 5", []),
        ("def test():\n    n, took = 1, time.time() - 1\n    assert n < 5", []),
        ("def test():\n    assert 2 < time.time() - a < 30", []),
        ("def test():\n    a = time.time()\n    b = time.time()\n    assert b - a < 5", [4]),
        ("def test():\n    a = process_time()\n    assert 5.0 > process_time() - a", [3]),
        ("def test():\n    each.append(time.time() - 1)\n    assert median(each) / 2 < 1", [3]),
        (
            "@pytest.mark.serial('a rate')\nclass A:\n    def f(self):\n        assert time.time() - a < 5",
            [],
        ),
        ("class A:\n    def test(self):\n        assert time.time() - a < 5", [3]),
        ("def test():\n    while f():\n        assert time.time() - a < 5", []),
    ],
)
def test_judged_durations_are_found(source: str, lines: list[int]) -> None:
    assert judged_durations.judged(source) == lines


def test_no_public_name_is_also_a_module() -> None:
    """`from bml.torch import name` gave the function or its module, depending on what was imported before."""
    for package in sorted((ROOT / "bml").rglob("__init__.py")):
        for node in ast.parse(package.read_text()).body:
            if isinstance(node, ast.Assign) and "__all__" in ast.unparse(node.targets[0]):
                modules = {path.stem for path in package.parent.iterdir()}
                assert not modules & set(ast.literal_eval(node.value)), package


def test_no_two_files_of_tests_have_one_name() -> None:
    """They are imported by their names alone, and the second one would not be collected."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py")]
    assert [name for name in set(names) if names.count(name) > 1 and name != "conftest.py"] == []
