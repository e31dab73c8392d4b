"""The mathematics of examples/train_digits.py, on one process and split among imagined servers."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from bml.train.batches import BatchPlan, assignment

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_digits.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    if importlib.util.find_spec("sklearn") is None:
        pytest.skip("the digits come with scikit-learn")
    spec = importlib.util.spec_from_file_location("train_digits_under_test", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def reference(example: ModuleType) -> Any:
    return example.reference()


def test_the_data_are_scikit_learns(example: ModuleType) -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    images, labels = datasets.load_digits(return_X_y=True)
    digits = example.load()
    loaded = np.concatenate([digits.test_x, digits.train_x])
    order = np.random.Generator(np.random.PCG64(1797)).permutation(1797)
    np.testing.assert_allclose((loaded + 0.6) * 8, images[order], atol=1e-5)
    assert np.concatenate([digits.test_y, digits.train_y]).tolist() == labels[order].tolist()


def test_reference_learns_the_digits(reference: Any) -> None:
    assert reference.accuracy >= 0.97
    assert reference.params.dtype == np.float32


@pytest.mark.slow
def test_reference_is_deterministic(example: ModuleType, reference: Any) -> None:
    again = example.reference()
    assert again.params.tobytes() == reference.params.tobytes()
    assert again.accuracy == reference.accuracy


def test_there_are_steps_for_the_faults_of_the_demo(example: ModuleType) -> None:
    n_samples = len(example.load().train_y)
    assert n_samples + example.TEST_SAMPLES == 1797
    assert 60 <= len(BatchPlan(n_samples, example.GLOBAL_BATCH, example.EPOCHS, 0)) <= 80


def test_gradient_agrees_with_finite_differences(example: ModuleType) -> None:
    digits = example.load()
    wide = digits._replace(train_x=digits.train_x.astype(np.float64))
    indices = np.arange(20)
    w = np.empty(example.N_PARAMS, np.float64)
    example.initialise(w)
    g = example.gradient(w, wide, indices)

    def loss(at: np.ndarray) -> float:
        scores = example.forward(at, wide.train_x[indices])[1]
        return float(-scores[np.arange(len(indices)), wide.train_y[indices]].sum())

    rng = np.random.default_rng(0)
    for direction in rng.standard_normal((5, len(w))):
        measured = (loss(w + 1e-5 * direction) - loss(w - 1e-5 * direction)) / 2e-5
        assert measured == pytest.approx(float(g @ direction), rel=1e-6)
    for coordinate in rng.integers(0, len(w), 50):
        unit = np.zeros_like(w)
        unit[coordinate] = 1e-5
        measured = (loss(w + unit) - loss(w - unit)) / 2e-5
        assert measured == pytest.approx(float(g[coordinate]), rel=1e-5, abs=1e-8)


def test_gradient_is_a_sum_over_samples(example: ModuleType, reference: Any) -> None:
    digits = example.load()
    parts = [example.gradient(reference.params, digits, np.arange(a, a + 10)) for a in (0, 10, 20)]
    whole = example.gradient(reference.params, digits, np.arange(30))
    np.testing.assert_allclose(sum(parts), whole, rtol=1e-4, atol=1e-5)
    assert not example.gradient(reference.params, digits, np.arange(0)).any()


def test_nine_servers_that_lose_three_end_where_the_reference_ends(
    example: ModuleType, reference: Any
) -> None:
    digits = example.load()
    w = np.empty(example.N_PARAMS, np.float32)
    momentum = np.zeros_like(w)
    example.initialise(w)
    lost, base = {20: 4, 30: 0, 40: 8}, set(range(9))
    for batch in BatchPlan(len(digits.train_y), example.GLOBAL_BATCH, example.EPOCHS, 0):
        members = base - {lost.get(batch.step, -1)}
        total = np.zeros_like(w)
        for own, extra in assignment(batch.indices, base, members).values():
            total += example.gradient(w, digits, own) + example.gradient(w, digits, extra)
        momentum = example.MOMENTUM * momentum + total / np.float32(len(batch.indices))
        w -= example.LEARNING_RATE * momentum
        base = members
    distance = np.linalg.norm(w - reference.params) / np.linalg.norm(reference.params)
    assert distance < 1e-5
    assert example.evaluate(w, digits)["accuracy"] == pytest.approx(reference.accuracy, abs=0.003)
