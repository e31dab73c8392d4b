"""Only `bml` is installed: programs may have modules called faults and topology."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import bml
from bml import errors

ROOT = Path(__file__).resolve().parent.parent


def printed(code: str, *path: Path) -> list[str]:
    """The words that this prints in a Python that looks for modules in these folders first."""
    lines = f"import sys\nsys.path[:0] = {[*map(str, path)]}\n{code}"
    done = subprocess.run([sys.executable, "-P", "-c", lines], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiled = shutil.ignore_patterns("__pycache__")  # others write there meanwhile
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for folder in ("bml", "topology", "faults"):
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=compiled)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", str(built), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    if "No matching distribution found" in done.stderr:
        pytest.skip("no package registry: setuptools is not to be had")
    assert done.returncode == 0, done.stderr
    return next(built.glob("*.whl"))


@pytest.mark.real
def test_a_wheel_holds_the_three_packages_as_one(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {"bml/topology/bcube.py", "bml/faults/plan.py", "bml/cluster/launcher/launch.py"} <= set(names)
    assert {"bml/py.typed", "bml/topology/py.typed", "bml/faults/py.typed"} <= set(names)
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {"bml"}


@pytest.mark.real
def test_a_program_may_have_modules_with_the_names_of_our_folders(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults" / "__init__.py").write_text("mine = 'own'")
    (tmp_path / "topology.py").write_text("mine = 'own'")
    code = "import bml, faults, topology, bml.faults, bml.topology\nbml.launch\n"
    code += "print(faults.mine, topology.mine, bml.topology.parse('bcube:3x2').n_servers)"
    assert printed(code, tmp_path, wheel) == ["own", "own", "9"]


def test_every_error_that_is_promised_is_public() -> None:
    promised = {each for each in errors.__all__ if each != "job_error"}
    assert promised <= {*bml.__all__}
    assert all(getattr(bml, name) is getattr(errors, name) for name in promised)
    assert {*bml.__all__} == promised | {*bml._HOMES}
    assert all(getattr(bml, name).__module__ == home for name, home in bml._HOMES.items())


def test_the_plugin_of_pytest_loads_nothing_of_the_runtime() -> None:
    loaded = "(name for name in sys.modules if name.startswith(('bml', 'numpy')))"
    code = f"import bml.pytest_plugin\nprint(*{loaded})"
    assert printed(code, ROOT) == ["bml", "bml.pytest_plugin"]


@pytest.mark.slow
def test_a_process_that_starts_loads_nothing_that_takes_long_and_few_need() -> None:
    """Each takes a quarter of a second and more, and so would every command, server and actor."""
    slow = ("ray", "networkx", "yaml", "numba", "matplotlib", "torch")
    code = "import bml, bml.cli, bml.cluster.process.worker; bml.launch\n"
    code += f"import sys; print(*(name for name in {slow} if name in sys.modules))"
    assert printed(code, ROOT) == []


@pytest.mark.slow
def test_the_command_and_the_package_need_no_extra() -> None:
    """A bare `pip install` has none of these: `bml run` must work without, and so must every --help."""
    extras = ("numba", "matplotlib", "torch", "pyroute2", "pyverbs", "fsspec", "prometheus_client", "sklearn")
    code = f"for name in {extras}: sys.modules[name] = None\n"
    code += "import bml.cli\nbml.launch\nprint(*(each.name for each in bml.cli.main.commands.values()))"
    assert {"run", "sim", "bench", "figures", "plan"} <= {*printed(code)}
