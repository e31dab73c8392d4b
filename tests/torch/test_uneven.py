"""PyTorch's Join on real ranks: means over the ranks that have a batch, also when some of them are killed."""

import pytest

torch = pytest.importorskip("torch")

from forked_ranks import run_groups  # noqa: E402

pytestmark = pytest.mark.real
N_BATCHES = [4, 5, 6, 7]


def wanted(victims: list[int], initial: bool, rank: int) -> list[list[float]]:
    """The means over the ranks that have a batch; `initial`: their sums over the number that is left."""
    found = []
    for number in range(N_BATCHES[rank]):
        left = [each for each in range(4) if each not in victims or number < 2]
        values = [each + 1 for each in left if N_BATCHES[each] > number]
        mean = sum(values) / len(left if initial else values)
        found.append([mean, 2 * mean])
    return found


CASES = [([], "step", False), ([3], "step", False), ([1], "forward", False), ([3], "step", True)]


def test_gradients_are_means_over_the_ranks_that_have_a_batch() -> None:
    each = [
        {"n_batches": N_BATCHES, "victims": victims, "after": after, "initial": initial}
        for victims, after, initial in CASES
    ]
    found = run_groups(4, "uneven_programs.means", each, limit_s=250)
    for (victims, after, initial), ranks in zip(CASES, found, strict=True):
        for rank, gradients in enumerate(ranks):
            message = f"{victims} killed after {after}, initial {initial}: rank {rank}"
            if rank in victims:
                assert gradients == -9, message
            else:
                expected = torch.tensor(wanted(victims, initial, rank))
                torch.testing.assert_close(torch.tensor(gradients), expected, msg=message)
