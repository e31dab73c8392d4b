"""`bml.torch.attach` in jobs that die as a whole and go on from a checkpoint: as if nothing had died."""

from __future__ import annotations

from typing import Any

import pytest
from files_in_memory import Memory
from sampled import chosen

torch = pytest.importorskip("torch")

from attached_programs import OPTIMIZERS, SCHEDULERS, training  # noqa: E402
from jobs_in_threads import on_servers  # noqa: E402
from overlapped_programs import SIZES  # noqa: E402

from bml.sim.programs.faults import Faults  # noqa: E402
from bml.train.keeping.resuming import Resumed, newest_whole, read  # noqa: E402

CASES = [
    (name, overlaps, step)
    for name in sorted(OPTIMIZERS)
    for overlaps in (False, True)
    for step in (5, 12, 23)
    if not overlaps or name != "LBFGS"
]


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "overlaps", "step"),
    chosen(lambda name, overlaps, step: (name, step) in {("AdamW", 12), ("SGD", 23)}, CASES),
)
def test_a_training_goes_on_with_the_same_bits(name: str, overlaps: bool, step: int) -> None:
    train = training(
        OPTIMIZERS[name],
        make_scheduler=SCHEDULERS["CosineAnnealingLR"],
        overlap_forward=overlaps,
        **SIZES,
    )
    whole = on_servers(train)
    memory = Memory({})

    def keeps(session: Any) -> Any:
        session.checkpoint(memory, every=3)
        return train(session)

    def goes_on(session: Any) -> Any:
        key = newest_whole(memory)
        session.resume(Resumed(key, read(memory, key)))
        return train(session)

    assert not on_servers(keeps, faults=Faults(ends_after=step)).values
    assert 0 < newest_whole(memory).steps <= step
    again = on_servers(goes_on)
    for one, other in zip(again.value, whole.value, strict=True):
        assert torch.equal(one, other)
    assert set(again.digests.values()) == set(whole.digests.values())
    assert all(ledger["complete"] for ledger in again.ledgers.values())
