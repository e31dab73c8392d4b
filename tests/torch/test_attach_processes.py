"""`bml.torch.attach` in real processes: what dies and joins changes no loss curve and no accuracy."""

from __future__ import annotations

import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")
load_digits = pytest.importorskip("sklearn.datasets").load_digits

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import bml.torch  # noqa: E402

pytestmark = pytest.mark.real

N_SAMPLES, GLOBAL_BATCH, EPOCHS = 1797, 360, 12
BATCHES = 5
"""Of an epoch."""
BUCKET_MIB = 0.004
"""Two buckets, so two steps a batch, three with running statistics."""
WAIT_AFTER, WAIT_S = 8, 40.0
"""After this epoch the servers wait until all of them contribute."""


def samples() -> tuple[Any, Any]:
    """Images (1797, 64) float32, and labels (1797,) int64."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images / 8 - 0.6, dtype=torch.float32), torch.tensor(labels)


def plain_model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


def full_model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))


def summed_loss(model: Any, batch: Any) -> Any:
    x, y = batch
    return functional.cross_entropy(model(x), y, reduction="sum")


def optimizer_and_scheduler(model: Any) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-4)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=EPOCHS * BATCHES + 1)


def evaluate(model: Any) -> tuple[float, float]:
    """The mean loss and the accuracy over all samples."""
    x, y = samples()
    model.eval()
    with torch.no_grad():
        out = model(x)
    model.train()
    return float(functional.cross_entropy(out, y)), float((out.argmax(dim=1) == y).float().mean())


def train(session: bml.Session, make_model: Any, n_servers: int, n_micro: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    model = make_model()
    optimizer, scheduler = optimizer_and_scheduler(model)
    run = bml.torch.attach(session, model, optimizer, scheduler, summed_loss, bucket_mib=BUCKET_MIB)
    losses = {}
    for epoch in session.steps(EPOCHS):
        for batch in run.batches(samples(), global_batch=GLOBAL_BATCH, epochs=1, seed=epoch):
            for part in batch.micro(n_micro):
                summed_loss(model, part).backward()
            optimizer.step()
            scheduler.step()
            losses[epoch, batch.batch_no] = evaluate(model)[0]
        if epoch == WAIT_AFTER:
            wait_for_all(session, n_servers)
    return {"losses": losses, "accuracy": evaluate(model)[1], "contributors": session.contributors}


def wait_for_all(session: bml.Session, n_servers: int) -> None:
    """Wait, in steps at which servers can join, until all contribute."""
    for _ in session.steps(int(WAIT_S / 0.05)):
        session.barrier()
        if len(session.contributors) == n_servers:
            break
        time.sleep(0.05)  # processors are for the servers that start


def train_plain(session: bml.Session) -> dict[str, Any]:
    return train(session, plain_model, len(session._communicator.servers), 1)


def train_full(session: bml.Session) -> dict[str, Any]:
    return train(session, full_model, len(session._communicator.servers), 2)


def fault_free(make_model: Any) -> dict[str, Any]:
    """The same batches in plain torch on one process."""
    from bml.train.batches import BatchPlan

    model = make_model()
    optimizer, scheduler = optimizer_and_scheduler(model)
    x, y = samples()
    losses = {}
    for epoch in range(EPOCHS):
        for batch in BatchPlan(N_SAMPLES, GLOBAL_BATCH, 1, epoch):
            rows = torch.from_numpy(batch.indices.copy())
            optimizer.zero_grad()
            (summed_loss(model, (x[rows], y[rows])) / len(rows)).backward()
            optimizer.step()
            scheduler.step()
            losses[epoch, batch.batch_no] = evaluate(model)[0]
    return {"losses": losses, "accuracy": evaluate(model)[1]}


def launched(train: Any, fabric: str, **settings: Any) -> bml.Result:
    # Up to nine servers compute in torch on two cores: one that lives may be silent for half a second.
    result = bml.launch(train, fabric, launcher="processes", transport="tcp", detect_s=2, **settings)
    assert not result.never_struck
    assert len(set(result.report["digests"].values())) == 1
    assert result.report["samples"]["complete"]
    return result


def assert_same_curve(value: dict[str, Any]) -> None:
    expected = fault_free(plain_model)["losses"]
    for moment, loss in value["losses"].items():
        assert loss == pytest.approx(expected[moment], rel=1e-4), moment


@pytest.mark.timeout(120)
def test_a_kill_changes_no_loss() -> None:
    result = launched(train_smoke, "bcube:2x2", faults=["kill:1@step=20"])
    assert sorted(result.values) == [0, 2, 3]
    assert len(result.value["losses"]) == EPOCHS * BATCHES
    assert_same_curve(result.value)


def train_smoke(session: bml.Session) -> dict[str, Any]:
    return train(session, plain_model, 3, 1)


def train_late(session: bml.Session) -> dict[str, Any]:
    torch.set_num_threads(1)
    model = plain_model()
    optimizer, scheduler = optimizer_and_scheduler(model)
    run = bml.torch.attach(
        session, model, optimizer, scheduler, summed_loss, bucket_mib=BUCKET_MIB, overlap_forward=True
    )
    losses = {}
    for epoch in session.steps(EPOCHS):
        for batch in run.batches(samples(), global_batch=GLOBAL_BATCH, epochs=1, seed=epoch):
            summed_loss(model, batch).backward()
            optimizer.step()
            scheduler.step()
        if not session.replays:  # a joiner passes here on its way to the epoch that the others are in
            losses[epoch, BATCHES - 1] = evaluate(model)[0]
        if epoch == WAIT_AFTER:
            wait_for_all(session, 4)
    return {"losses": losses, "contributors": session.contributors}


@pytest.mark.timeout(120)
def test_steps_in_the_next_forward_pass_have_the_same_losses() -> None:
    result = launched(train_late, "bcube:2x2", faults=["kill:1@step=23", "join:1@step=60"])
    assert sorted(result.values) == [0, 1, 2, 3]
    assert result.value["contributors"] == (0, 1, 2, 3)
    for value in result.values.values():
        assert_same_curve(value)


class Digits(torch.utils.data.Dataset):  # type: ignore[misc]
    """Samples one by one; `n_here` counts those that were loaded in the server's own process."""

    def __init__(self) -> None:
        self._x, self._y = samples()
        self.n_here = 0

    def __len__(self) -> int:
        return N_SAMPLES

    def __getitem__(self, number: int) -> tuple[Any, int]:
        self.n_here += torch.utils.data.get_worker_info() is None
        return self._x[number], int(self._y[number])


def train_with_workers(session: bml.Session) -> dict[str, Any]:
    torch.set_num_threads(1)
    model = plain_model()
    optimizer, scheduler = optimizer_and_scheduler(model)
    dataset = Digits()
    run = bml.torch.attach(session, model, optimizer, scheduler, summed_loss, bucket_mib=BUCKET_MIB)
    losses = {}
    for epoch in session.steps(4):
        for batch in run.batches(dataset, global_batch=GLOBAL_BATCH, epochs=1, seed=epoch, num_workers=1):
            summed_loss(model, batch).backward()
            optimizer.step()
            scheduler.step()
            losses[epoch, batch.batch_no] = evaluate(model)[0]
    return {"losses": losses, "n_here": dataset.n_here}


@pytest.mark.timeout(120)
def test_workers_load_samples_also_where_a_server_dies() -> None:
    result = launched(train_with_workers, "bcube:2x2", faults=["kill:1@step=20"])
    assert sorted(result.values) == [0, 2, 3]
    for value in result.values.values():
        assert_same_curve(value)
        # Its part of the lost share, and the batches that were loaded for four servers.
        assert 0 < value["n_here"] < 0.25 * 4 * N_SAMPLES / 3, value["n_here"]


FAULTS = [
    "kill:4@step=20",
    "freeze:7@step=45",
    "blackhole:2/0@step=65",
    "switch:1/1@step=80",
    "join:4@step=85",
    "join:7@step=85",
]


@pytest.mark.timeout(200)
def test_what_dies_and_joins_changes_no_loss() -> None:
    result = launched(train_plain, "bcube:3x2", faults=FAULTS)
    assert sorted(result.values) == list(range(9))
    assert result.value["contributors"] == tuple(range(9))
    for value in result.values.values():
        assert_same_curve(value)


@pytest.mark.timeout(200)
def test_dropout_and_batch_normalisation_among_faults_cost_no_accuracy() -> None:
    result = launched(train_full, "bcube:3x2", faults=FAULTS)
    assert sorted(result.values) == list(range(9))
    assert result.value["accuracy"] == pytest.approx(fault_free(full_model)["accuracy"], abs=0.01)
    assert len({value["accuracy"] for value in result.values.values()}) == 1, "equal running statistics"
