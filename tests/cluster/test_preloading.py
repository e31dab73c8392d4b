"""The fork server imports the slow modules of a training function once."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import bml
from bml.cluster.fleets.fork_server import ForkServer, threads_of
from bml.cluster.fleets.preloading import referenced, worth_preloading
from bml.cluster.process.pickling import pack


def test_slow_modules_are_preloaded_in_their_order() -> None:
    loaded = [
        "os",
        "torch",
        "numpy",
        "torch._C",
        "torch.nn",
        "torch.nn.modules.conv.deep",
        "sklearn.datasets",
    ]
    loaded += ["torchvisionary", "scipy", "ray", "bml", "bml.torch", "bml.train", "torch._dynamo"]
    assert worth_preloading(loaded, ["torch", "sklearn", "bml.torch"]) == [
        "torch",
        "torch._C",
        "torch.nn",
        "sklearn.datasets",
        "bml.torch",
        "torch._dynamo",
    ]


def test_optimizers_of_torch_are_preloaded_and_nothing_where_torch_is_not_used() -> None:
    loaded = ["torch", "torch.optim"]
    assert worth_preloading(loaded, ["torch.nn"]) == ["torch", "torch.optim", "torch._dynamo"]
    assert worth_preloading(loaded, ["torchvisionary", "numpy"]) == []
    assert (
        worth_preloading(["numpy", "scipy.sparse", "bml.schedule", "ray._private"], ["torch", "numpy"]) == []
    )


def helper(session: Any) -> Any:
    return models.make()


models = ModuleType("models_of_a_user")


def lazily(session: Any) -> Any:
    import torch

    return torch.ones(3)


@pytest.mark.parametrize(
    ("train", "has_layers", "uses_torch"),
    [(helper, True, True), (helper, False, False), (lazily, False, True)],
)
def test_a_function_refers_to_modules_by_way_of_others(
    train: Any, has_layers: bool, uses_torch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sys.path`, which is sent along, names folders that may be called torch."""
    layers = ModuleType("torch.nn")
    models.__dict__.pop("layers", None)
    if has_layers:
        models.layers = layers
    monkeypatch.syspath_prepend("/somewhere/torch")
    known = {**sys.modules, "models_of_a_user": models, "torch": ModuleType("torch"), "torch.nn": layers}
    monkeypatch.setitem(sys.modules, "models_of_a_user", models)
    found = referenced(pack(train), known)
    assert any(name.partition(".")[0] == "torch" for name in found) == uses_torch


@pytest.mark.parametrize(
    ("n_cores", "n_servers", "environment", "openmp", "mkl"),
    [
        (2, 9, {}, "1", "1"),
        (16, 4, {}, "4", "4"),
        (16, 5, {}, "3", "3"),
        (16, 4, {"OMP_NUM_THREADS": "2"}, "2", "2"),
        (16, 4, {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "7"}, "2", "7"),
        (16, 4, {"OMP_NUM_THREADS": ""}, "4", "4"),
    ],
)
def test_servers_share_the_cores(
    n_cores: int, n_servers: int, environment: dict[str, str], openmp: str, mkl: str
) -> None:
    found = threads_of(n_cores, n_servers, {**environment, "HOME": "/"})
    assert found == {
        "OMP_NUM_THREADS": openmp,
        "MKL_NUM_THREADS": mkl,
        "OPENBLAS_NUM_THREADS": "1",
        "HOME": "/",
    }


PRELOADS = """
import json, os, sys
from bml.cluster.fleets.preloading import preload
preload(sys.argv[1])
there = [name for name in ("ends", "fine") if name in sys.modules]
print(json.dumps([os.getpid(), len(os.listdir("/proc/self/task")), there]))
"""


@pytest.mark.parametrize("threads", [False, True])
def test_nothing_is_preloaded_if_that_starts_a_thread(tmp_path: Path, threads: bool) -> None:
    (tmp_path / "fine.py").write_text("")
    (tmp_path / "ends.py").write_text("import sys; sys.exit('one that ends the process')")
    starts = "import threading, time; threading.Thread(target=time.sleep, args=(100,), daemon=True).start()"
    (tmp_path / "starts.py").write_text(starts)
    modules = ["none.such", "ends", "fine", *(["starts"] if threads else [])]
    path = ":".join(filter(None, [str(tmp_path), *sys.path]))
    process = subprocess.Popen(
        [sys.executable, "-c", PRELOADS, json.dumps(modules)],
        env={"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert json.loads(out) == [process.pid, 1, [] if threads else ["fine"]]


@pytest.mark.slow
def test_imports_do_not_count_against_the_time_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package of gigabytes may take minutes on a slow network."""
    (tmp_path / "takes_long.py").write_text("import time\ntime.sleep(4)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    fork_server = ForkServer(prints=False, modules=["takes_long"])
    ours, theirs = socket.socketpair()
    try:
        with ours:
            assert fork_server.fork(theirs, within_s=3.5) > 0
    finally:
        fork_server.close()


def uses_torch(session: bml.Session) -> dict[str, Any]:
    """Says what was there before it imported anything, and computes in OpenMP and in autograd."""
    there = "torch._dynamo" in sys.modules
    import torch

    x = torch.full((600, 600), 2.0, requires_grad=True)
    (x @ x).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    gradient = session.allreduce(x.grad.numpy()[:10].ravel())
    return {"there": there, "threads": torch.get_num_threads(), "sum": float(gradient[0]), "argv": sys.argv}


@pytest.mark.real
def test_servers_have_torch_from_the_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    result = bml.launch(uses_torch, "bcube:2x2", launcher="processes")
    assert [each["there"] for each in result.values.values()] == [True] * 4
    assert [each["threads"] for each in result.values.values()] == [2] * 4
    assert [each["sum"] for each in result.values.values()] == [4 * 2 * 2 * 600.0] * 4
    assert [each["argv"] for each in result.values.values()] == [sys.argv] * 4


_DRAWS = """
import os, random, sys
import numpy as np, torch
from bml.cluster.fleets.fork_server import draw_anew

for _ in range(2):
    reads, writes = os.pipe()
    if os.fork() == 0:
        draw_anew()
        numbers = [random.random(), np.random.rand(), torch.rand(1, dtype=torch.float64).item()]
        os.write(writes, repr(numbers).encode())
        os._exit(0)
    os.wait()
    print(os.read(reads, 1000).decode())
"""


@pytest.mark.slow
def test_forked_processes_draw_different_numbers() -> None:
    pytest.importorskip("torch")
    told = subprocess.run([sys.executable, "-c", _DRAWS], capture_output=True, text=True, timeout=60)
    assert told.returncode == 0, told.stderr
    first, second = map(json.loads, told.stdout.splitlines())
    assert all(one != other for one, other in zip(first, second, strict=True)), (first, second)
