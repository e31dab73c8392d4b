"""Handwritten digits on every server of the fabric: a small numpy network, trained in step despite failures.

python examples/train_digits.py --single                                   one process, the reference
python examples/train_digits.py --fabric bcube:3x2                         nine servers
python examples/train_digits.py --fault kill:4@step=20 --fault blackhole:2/0@step=30
bml run examples/train_digits.py --fabric bcube:3x2                        the same through the command
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import numpy.typing as npt

from bml.train.batches import BatchPlan, Indices

Floats = npt.NDArray[np.float32]

PIXELS, HIDDEN, CLASSES = 64, 128, 10
N_PARAMS = PIXELS * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES
GLOBAL_BATCH = 288
EPOCHS = 14
TEST_SAMPLES = 357
LEARNING_RATE = 0.2
MOMENTUM = 0.9


class Digits(NamedTuple):
    """Images (float32, rows of 64 pixels, -0.6..1.4) and labels (int64), split once and for all."""

    train_x: Floats
    train_y: npt.NDArray[np.int64]
    test_x: Floats
    test_y: npt.NDArray[np.int64]


def load() -> Digits:
    """The 1797 digits that come with scikit-learn; the split is seeded and the same on every server.

    This reads the file that `sklearn.datasets.load_digits` reads: importing the library for it would cost
    every server a second of processor time.
    """
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("the digits come with scikit-learn: pip install scikit-learn")
    table = np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    images, labels = table[:, :-1], table[:, -1]
    order = np.random.Generator(np.random.PCG64(1797)).permutation(len(labels))
    x, y = (images[order] / 8 - 0.6).astype(np.float32), labels[order].astype(np.int64)
    return Digits(x[TEST_SAMPLES:], y[TEST_SAMPLES:], x[:TEST_SAMPLES], y[:TEST_SAMPLES])


def layers(w: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Views into the flat vector: weights and biases of the hidden and of the output layer."""
    sizes = [PIXELS * HIDDEN, HIDDEN, HIDDEN * CLASSES]
    w1, b1, w2, b2 = np.split(w, np.cumsum(sizes))
    return w1.reshape(PIXELS, HIDDEN), b1, w2.reshape(HIDDEN, CLASSES), b2


def initialise(w: Floats) -> None:
    """Fill the parameters from a seed: no broadcast is needed for all servers to start alike."""
    rng = np.random.Generator(np.random.PCG64(0))
    w1, b1, w2, b2 = layers(w)
    w1[:] = rng.standard_normal(w1.shape) / np.sqrt(PIXELS)
    w2[:] = rng.standard_normal(w2.shape) / np.sqrt(HIDDEN)
    b1[:] = b2[:] = 0


def forward(w: Floats, x: Floats) -> tuple[Floats, Floats]:
    """Hidden activations and log-probabilities.

    Tanh, because it is smooth: the order in which the servers' gradients are added changes only the last bits
    of a step, and the whole run keeps them small.
    """
    w1, b1, w2, b2 = layers(w)
    hidden = np.tanh(x @ w1 + b1)
    scores = hidden @ w2 + b2
    scores -= scores.max(axis=1, keepdims=True)
    scores -= np.log(np.exp(scores).sum(axis=1, keepdims=True))
    return hidden, scores


def gradient(w: Floats, digits: Digits, indices: Indices) -> Floats:
    """Gradient of the cross-entropy, SUMMED over training samples `indices`; zeros when there are none."""
    g = np.zeros_like(w)
    if not len(indices):
        return g
    x, y = digits.train_x[indices], digits.train_y[indices]
    hidden, scores = forward(w, x)
    delta = np.exp(scores)
    delta[np.arange(len(y)), y] -= 1
    w2 = layers(w)[2]
    g1, gb1, g2, gb2 = layers(g)
    np.matmul(hidden.T, delta, out=g2)
    np.sum(delta, axis=0, out=gb2)
    back = (delta @ w2.T) * (1 - hidden * hidden)
    np.matmul(x.T, back, out=g1)
    np.sum(back, axis=0, out=gb1)
    return g


def evaluate(w: Floats, digits: Digits) -> dict[str, float]:
    """Accuracy and mean cross-entropy on the held-out digits."""
    scores = forward(w, digits.test_x)[1]
    loss = -scores[np.arange(len(digits.test_y)), digits.test_y].mean()
    return {"accuracy": float((scores.argmax(axis=1) == digits.test_y).mean()), "loss": float(loss)}


def train(session: Any) -> dict[str, float]:
    """Runs on every server of the fabric; `session` is a bml.Session."""
    digits = load()
    w = session.empty(N_PARAMS, "float32")
    momentum = np.zeros_like(w)
    initialise(w)
    session.state(params=w, momentum=momentum)

    def share(indices: Indices) -> Floats:
        return gradient(w, digits, indices)

    for batch in session.batches(len(digits.train_y), global_batch=GLOBAL_BATCH, epochs=EPOCHS, seed=0):
        mean = batch.allreduce(share(batch.indices), recompute=share)
        momentum *= MOMENTUM
        momentum += mean
        w -= LEARNING_RATE * momentum
    return evaluate(w, digits)


@dataclass(frozen=True)
class OneBatch:
    """A global batch that one process computes alone."""

    indices: Indices

    def allreduce(self, g: Floats, recompute: Callable[[Indices], Floats]) -> Floats:
        return g / np.float32(len(self.indices))


@dataclass
class OneProcess:
    """The part of bml.Session that `train` uses, without servers: a distributed run must match it."""

    kept: dict[str, Floats] = field(default_factory=dict)

    def empty(self, n: int, dtype: str) -> Floats:
        return np.empty(n, dtype)

    def state(self, **arrays: Floats) -> None:
        self.kept.update(arrays)

    def batches(self, n_samples: int, *, global_batch: int, epochs: int, seed: int) -> Iterator[OneBatch]:
        return (OneBatch(batch.indices) for batch in BatchPlan(n_samples, global_batch, epochs, seed))


class Reference(NamedTuple):
    """Outcome of the single-process run; `params` is the flat vector, float32, shape (N_PARAMS,)."""

    accuracy: float
    loss: float
    params: Floats


def reference() -> Reference:
    """The same training function over the same global batches, on one process."""
    session = OneProcess()
    outcome = train(session)
    return Reference(outcome["accuracy"], outcome["loss"], session.kept["params"])


@click.command()
@click.option("--fabric", default="bcube:3x2", show_default=True, help="ports x levels")
@click.option("--fault", "faults", multiple=True, help="e.g. kill:4@step=20; may be repeated")
@click.option("--launcher", default="ray", show_default=True, help="ray or processes")
@click.option("--single", is_flag=True, help="the single-process reference, without a fabric")
def main(fabric: str, faults: tuple[str, ...], launcher: str, single: bool) -> None:
    """Train on handwritten digits. Example: train_digits.py --fabric bcube:3x2 --fault kill:4@step=20"""
    if single:
        one = reference()
        click.echo(f"single process: accuracy {one.accuracy:.4f}, loss {one.loss:.4f}")
        return
    import bml

    result = bml.launch(train, fabric=fabric, faults=faults, launcher=launcher)
    for view in result.report["views"]:
        click.echo(f"view {view['epoch']}: {len(view['members'])} servers, {view['reason']}")
    same = len(set(result.report["digests"].values())) == 1
    click.echo(
        f"{len(result.values)} servers: accuracy {result.value['accuracy']:.4f}, "
        f"loss {result.value['loss']:.4f}, parameters {'identical' if same else 'DIFFERENT'} on all"
    )


if __name__ == "__main__":
    main()
