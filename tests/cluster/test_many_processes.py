"""Sixty-four servers as processes of one machine, which train the digits while parts of them fail."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import jobs
import numpy as np
import pytest

import bml

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_digits.py"
N_SERVERS = 64
DEAD, CUT = 40, 9
JOINED = 30


@pytest.fixture
def example() -> Iterator[ModuleType]:
    if importlib.util.find_spec("sklearn") is None:
        pytest.skip("the digits come with scikit-learn")
    spec = importlib.util.spec_from_file_location("train_digits_of_many", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)  # servers cannot import it
    yield module
    cloudpickle.unregister_pickle_by_value(module)


def paced(example: ModuleType) -> Any:
    """The example's training function, which takes longer for a step until the server that joins is there.

    It starts in some seconds where so many share the cores, and no job waits for it.
    """
    example_train = example.train

    def train(session: bml.Session) -> Any:
        batches = session.batches

        def slowly(*arguments: Any, **settings: Any) -> Iterator[Any]:
            for number, batch in enumerate(batches(*arguments, **settings), 1):
                yield batch
                if number >= JOINED:
                    jobs.pace(session, N_SERVERS, 0.5)

        session.batches = slowly  # type: ignore[method-assign]
        return example_train(session)

    return train


@pytest.mark.real
@pytest.mark.timeout(400)
def test_sixty_four_servers_train_the_digits_with_a_kill_a_cut_and_a_join(example: ModuleType) -> None:
    result = bml.launch(
        paced(example),
        fabric="bcube:8x2",
        launcher="processes",
        transport="tcp",
        detect_s=5.0,
        faults=[f"kill:{DEAD}@step=15", f"cut:{CUT}/1@step=25", f"join:{DEAD}@step={JOINED}"],
    )
    report = result.report
    assert sorted(result.values) == list(range(N_SERVERS))
    assert len({*report["digests"].values()}) == 1
    assert report["samples"]["complete"]
    views = report["views"]
    assert any(DEAD not in view["members"] for view in views)
    assert f"link:{CUT}/1" in views[-1]["failures"]
    assert len(views[-1]["members"]) == N_SERVERS
    alone = example.reference()
    assert result.value["accuracy"] == pytest.approx(alone.accuracy, abs=0.01)
    np.testing.assert_allclose(result.value["loss"], alone.loss, rtol=1e-3)
