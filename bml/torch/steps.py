"""Carries out the collectives of one process group: each is one step of the communicator, or several.

Ranks are the ids of the servers. The world stays what it was when ranks are lost: `contributors` says whose
part is in a result.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from bml.errors import ContributorLost, StepMismatch
from bml.protocol.step.workspace import Padded, written
from bml.topology.errors import UsageError
from bml.train.communicator import Committed, Communicator

_UNEVEN = (
    "Servers are the ranks of the group. Give all ranks the same model, of the same dtypes, and the same "
    "options of DistributedDataParallel. If they have different numbers of batches, put the loop into "
    "torch.distributed.algorithms.Join([ddp]), or give the loader and the sampler drop_last=True"
)
_log = logging.getLogger("bml.torch")

Vector = npt.NDArray[np.generic]
Prepare = Callable[[tuple[int, ...]], Vector | Padded]
"""Prepares this rank's contribution for the ranks that contribute."""


class UnfitSizes(UsageError):
    """The ranks were given sizes that do not fit; all raise it in the same step."""


class GroupSteps:
    """The steps of one rank of a group of `n_ranks`."""

    def __init__(self, communicator: Communicator, rank: int, n_ranks: int):
        self.rank = rank
        self.n_ranks = n_ranks
        self.contributors = communicator.servers
        """The ranks whose parts are in the last result; at first all ranks."""
        self.is_alone = communicator.joins
        """Whether this rank joins and is not among the others yet: results are its own values then."""
        self.communicator = communicator
        self._n_lost = 0
        self._failed: BaseException | None = None
        """Why a collective was not carried out: a later one of this rank would be taken for it."""

    def empty(self, size: int, dtype: npt.DTypeLike) -> Vector:
        """An uninitialised array of shape (size,) that is sent without a copy."""
        return self.communicator.empty(size, dtype)

    def carry_out(self, job: Callable[[GroupSteps], None]) -> None:
        """Call the job of one collective, and raise its error.

        An error that other ranks may not have is raised by all later collectives, too: this rank may have
        left out a step, and the others would take its next one for that.
        """
        if self._failed is not None:
            raise self._failed
        try:
            job(self)
        except (ContributorLost, UnfitSizes):
            raise
        except BaseException as error:
            self._failed = error
            raise

    def step(self, text: str, op: str, prepare: Prepare, shared: bool = True) -> Committed:
        """Reduce one vector of every rank; `text` describes the call, alike on all ranks.

        With `shared` the result may be read-only. Raises the error that ends the job.
        """
        communicator = self.communicator
        if self.is_alone:
            own = (self.rank,)
            return Committed(0, 0, own, written(prepare(own)))
        signature = zlib.crc32(text.encode())
        while True:
            view = communicator.view
            vector = prepare(view.contributors)
            try:
                outcome = communicator.sync(view.epoch, vector, op, text, signature, shared)
            except StepMismatch as error:
                raise StepMismatch(f"{error}. {_UNEVEN}") from error
            if isinstance(outcome, Committed):
                self.contributors = outcome.contributors
                return outcome

    def require_all(self, call: str) -> None:
        """Raise ContributorLost if a rank's part is missing in the last result."""
        lost = sorted(set(range(self.n_ranks)) - set(self.contributors))
        if lost and not self.is_alone:
            raise ContributorLost(
                f"{call}: ranks {lost} of the group are lost, and with them the parts of the tensor that "
                "only they have, such as shards of parameters. Let this rank end, too, if it needs them; "
                "all_gather with a list of tensors gives those of the lowest rank in their places"
            )

    def tell_losses(self) -> None:
        """Say once, on the lowest rank that is left, that others were lost."""
        lost = sorted(set(range(self.n_ranks)) - set(self.contributors))
        if len(lost) > self._n_lost and self.rank == min(self.contributors):
            _log.warning(
                "ranks %s are lost: sums of floating tensors are multiplied by %d/%d from now on, those of "
                "integers are not, and all_gather has the lowest rank's tensors in their places",
                *(lost, self.n_ranks, len(self.contributors)),
            )
        self._n_lost = len(lost)
