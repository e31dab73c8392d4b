"""`bml.torch.attach`: a torch training loop on a session."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakSet

import torch

from bml.topology.errors import UsageError
from bml.torch.attached.ahead import Ahead
from bml.torch.attached.bucket import Again
from bml.torch.attached.gradients import Gradients
from bml.torch.attached.layout import NO_SAMPLES, seed_of
from bml.torch.attached.memory import trained
from bml.torch.attached.optimizers import keep_first_gradients, prime
from bml.torch.attached.recompute import LEAST_COMPARED, Fetch, Loss, Recompute, are_alike
from bml.torch.attached.share import Share
from bml.torch.attached.source import Source
from bml.torch.attached.state import TrainingState
from bml.torch.attached.statistics import Statistics
from bml.torch.devices.chance import seed_all
from bml.torch.overlap.before import Before
from bml.torch.overlap.overlap import Overlap
from bml.torch.tensors import norm
from bml.train.batch import Batch
from bml.train.batches import EQUAL, BatchPlan, Indices, shares
from bml.train.session import Session

_STAND_INS = 2
"""How many samples a server computes that has none: batch normalisation needs two."""
_attached: WeakSet[Session] = WeakSet()


def attach(
    session: Session,
    model: Any,
    optimizer: Any,
    scheduler: Any = None,
    loss: Loss | None = None,
    *,
    bucket_mib: float | None = None,
    allow_unused: bool = False,
    overlap_forward: bool = False,
) -> Run:
    """Train a model in step with all servers of the session: `run.batches` gives the data.

    `model` is an nn.Module on the CPU or on one GPU, `optimizer` a torch optimizer of its parameters,
    `scheduler` anything with `state_dict` and `load_state_dict`. Call it once, after checkpoints were loaded
    and before the training loop. Backward must be that of a loss SUMMED over the samples of the share;
    `optimizer.step()` then sees the mean over the global batch.

    `loss(model, samples)` returns the loss summed over any collated samples, as the loop computes it. With
    it, the others compute the samples of a server that is lost; without it they are left out of that step.
    Gradients are sent in buckets of about `bucket_mib` MiB while backward computes the next ones; by default
    of an eighth of them all, 1 to 8 MiB. With `allow_unused` a parameter that got no gradient counts as one
    with zeros, without it is an error.

    With `overlap_forward` communication goes on under the forward pass of the next batch: `optimizer.step()`
    returns at once, and its effect on a parameter comes when that parameter is used first. The bits are the
    same.

    Raises UsageError for parameters that are sparse, complex, of 8 bits or on several devices, for one that
    requires a gradient and is not in the optimizer, for an optimizer or state that a server that joins could
    not be given, for what `overlap_forward` cannot be had with, and if the session has a model already.
    """
    _check(session, model, optimizer, scheduler, loss)
    named = trained(model, optimizer)
    if bucket_mib is not None and not 0 < bucket_mib < 1 << 20:
        raise UsageError(f"bucket_mib is {bucket_mib}: give a number of MiB above 0")
    prime(optimizer)
    state = TrainingState(model, optimizer, scheduler)
    state.name(session)
    bucket_nbytes = None if bucket_mib is None else max(1, int(bucket_mib * (1 << 20)))
    gradients = Gradients(session, named, Statistics(session, model), bucket_nbytes, bool(allow_unused))
    _attached.add(session)
    before = Before(model, [each.parameter for each in named])
    if overlap_forward:
        gradients.overlap = Overlap(session, model, optimizer, gradients.buckets, before, loss is not None)
    recompute = Recompute(model, loss, named, before) if loss is not None else None
    run = Run(session, optimizer, state, gradients, recompute, named[0].parameter.device)
    keep_first_gradients(optimizer)
    if gradients.overlap is not None:
        gradients.overlap.count_hooks()
    return run


class Run:
    """The training of one model; `attach` makes it."""

    def __init__(
        self,
        session: Session,
        optimizer: Any,
        state: TrainingState,
        gradients: Gradients,
        recompute: Recompute | None,
        where: Any,
    ):
        self._session = session
        self._optimizer = optimizer
        self._state = state
        self._gradients = gradients
        self._overlap = gradients.overlap
        self._recompute = recompute
        self._where = where
        self._batch: Batch | None = None
        self._share: Share | None = None
        self._again: Again | None = None
        self._seed_after = 0
        self._has_warned, self._has_compared = False, session.joins
        self._has_stepped = False
        optimizer.register_step_pre_hook(self._before_step)

    def batches(
        self,
        dataset: Any,
        *,
        global_batch: int,
        epochs: int,
        seed: int = 0,
        balance: bool = False,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        device: Any = None,
    ) -> Iterator[Share]:
        """Iterate over this server's shares of the global batches, as `Session.batches` divides them.

        With `balance` servers that load and compute slower get smaller shares.
        `dataset` has samples by index and a length, or is a tensor, a tuple or a dict of tensors with a row
        for each sample. Samples are collated by `collate_fn`, by default as torch's DataLoader does, and
        loaded in advance by `num_workers` processes. With `device` their tensors are moved there, both those
        of the loop and those that `loss` is given. Each share begins without gradients. Torch's random
        numbers are seeded by `seed`, the batch and the share before its samples are loaded and before it is
        computed, and by `seed` and the batch alone after the sums. A share must be ended with
        `optimizer.step()`, or with `reduce()` where a step is skipped.

        Raises UsageError for numbers out of range, for other data sets, and where a share was not ended.
        """
        source = Source(dataset, collate_fn, device)
        plan = BatchPlan(len(source), global_batch, epochs, seed, balance)
        fetch, end = self._fetch(source, plan, num_workers)
        loop = self._session.batches(
            len(source), global_batch=global_batch, epochs=epochs, seed=seed, balance=balance
        )
        try:
            for batch in loop:
                self._warn_of_left_out()  # of the batch before, of which some may have come since
                yield self._begin(batch, plan.seed, source.fetch, fetch)
                if not self._gradients.is_reduced:
                    raise UsageError(
                        f"{batch} was not ended: call optimizer.step(), or run.reduce() where the step is "
                        "skipped, before the loop goes on"
                    )
                self._state.check()
        finally:
            self._batch = self._share = self._again = None
            self._has_stepped = False
            self._gradients.close()
            end()
            loop.close()  # type: ignore[attr-defined]
            if self._overlap is not None:
                self._overlap.close()

    def reduce(self) -> None:
        """Wait for the sums over all servers: gradients are the means over the global batch from here on.

        Call it before anything that reads or changes gradients: `clip_grad_norm_`, `scaler.unscale_`,
        `scaler.step`, and before other calls of the session. `optimizer.step()` calls it otherwise. A second
        call for a batch does nothing. Raises UsageError outside of the loop, for gradients that are missing
        or were changed, and the error that ends the job.
        """
        if self._gradients.is_reduced:
            return
        self._begin_all()
        self._gradients.finish()
        seed_all(self._seed_after, self._where)  # of whatever the optimizer draws
        self._warn_of_left_out()

    def synchronize(self) -> None:
        """Wait until every parameter has its new values, with `overlap_forward`; otherwise they have them.

        A parameter that is used waits by itself. Call this before its memory is read past torch, in another
        thread, or through the optimizer's `state`. Raises the error that ends the job.
        """
        if self._overlap is not None:
            self._overlap.take_all()

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        overlap = self._overlap
        if overlap is not None and overlap.is_stepping:
            return
        if overlap is not None and self._has_stepped:
            raise UsageError(
                f"optimizer.step() was called twice in {self._batch}: with overlap_forward its gradients are "
                "gone after the first; call run.reduce() before both"
            )
        has_stepped = not self._gradients.is_reduced
        if overlap is None or self._gradients.is_reduced or not overlap.knows_order:
            self.reduce()
            self._has_stepped = has_stepped
            return
        self._begin_all()
        self._has_stepped = has_stepped
        overlap.defer(args, kwargs)
        self._gradients.finish_first()
        seed_all(self._seed_after, self._where)

    def _begin_all(self) -> None:
        self._gradients.begin_all(self._optimizer)
        self._compare()

    def _begin(self, batch: Batch, seed: int, fetch: Fetch, fetch_ahead: Callable[[Batch], Any]) -> Share:
        step, computed = batch.whole.step, _computed(batch.indices, batch.whole.indices)
        self._again = self._recompute.of_batch(seed, step, fetch) if self._recompute else None
        self._seed_after = seed_of(seed, step, NO_SAMPLES)
        seed_of_share = seed_of(seed, step, computed)
        seed_all(seed_of_share, self._where)  # a data set may draw random numbers
        samples = fetch_ahead(batch)
        seed_all(seed_of_share, self._where)  # workers may have drawn them
        self._batch, self._has_stepped = batch, False
        self._gradients.open(batch, self._again)
        n_samples = len(computed)
        self._share = Share(batch, samples, n_samples, self._gradients)
        return self._share

    def _fetch(
        self, source: Source, plan: BatchPlan, n_workers: int
    ) -> tuple[Callable[[Batch], Any], Callable[[], None]]:
        """A function that returns the samples of a batch, and one that ends the workers."""
        if isinstance(n_workers, bool) or not isinstance(n_workers, int) or n_workers < 0:
            raise UsageError(f"num_workers must be a whole number, at least 0; it is {n_workers!r}")
        if not n_workers or source.is_in_memory:
            return lambda batch: source.fetch(_computed(batch.indices, batch.whole.indices)), lambda: None
        session, weights = self._session, EQUAL

        def foretell(step: int) -> Indices:
            whole = plan.batch(step).indices
            return _computed(
                shares(whole, session.contributors, weights).get(session.server, whole[:0]), whole
            )

        ahead = Ahead(source, len(plan), foretell, n_workers, plan.seed)

        def fetch(batch: Batch) -> Any:
            nonlocal weights
            weights = batch.weights
            samples = ahead.fetch(batch.whole.step, _computed(batch.indices, batch.whole.indices))
            if not ahead.was_ahead:
                batch.leave_untimed()
            return samples

        return fetch, ahead.close

    def _compare(self) -> None:
        """Compare the first gradient with that of `loss`, while it is sent: one may be a sum, one a mean."""
        batch, share, again = self._batch, self._share, self._again
        if self._has_compared or again is None or batch is None or share is None:
            return
        self._has_compared = True
        if not share.is_whole or len(batch.indices) < LEAST_COMPARED:
            return
        found, wanted = (
            self._gradients.norm(),
            math.hypot(*(norm(each.float()) for each in again(batch.indices))),
        )
        if not are_alike(found, wanted):
            raise UsageError(
                f"the first gradient has the norm {found:.3g}, but that of `loss` over the same "
                f"{len(batch.indices)} samples has {wanted:.3g}: both must be of the same loss, SUMMED over "
                'the samples (reduction="sum")'
            )

    def _warn_of_left_out(self) -> None:
        batch = self._batch
        if self._recompute is not None or self._has_warned or batch is None:
            return
        contributors = self._session.contributors
        lost = sorted(set(batch.base) - set(contributors))
        if lost and self._session.server == min(contributors):
            self._has_warned = True
            warnings.warn(
                f"the samples of server {lost[0]} are left out of {batch}, and so it is in every batch in "
                "which a server is lost: give attach a loss, and the others compute them",
                stacklevel=2,
            )


def _computed(own: Indices, whole: Indices) -> Indices:
    """The samples that a server computes: its own, or some of the batch that do not count, if it has none."""
    return own if len(own) else whole[:_STAND_INS]


def _check(session: Any, model: Any, optimizer: Any, scheduler: Any, loss: Any) -> None:
    if not isinstance(session, Session):
        raise UsageError(
            f"attach takes the session that a training function is given, not a {type(session).__name__}"
        )
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"attach takes a torch.nn.Module as its model, not a {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"attach takes a torch.optim.Optimizer as its optimizer, not a {type(optimizer).__name__}"
        )
    if scheduler is not None and not hasattr(scheduler, "load_state_dict"):
        raise UsageError(
            f"the scheduler, a {type(scheduler).__name__}, has no state_dict and load_state_dict: pass None, "
            "and name its state with session.state_fn"
        )
    if loss is not None and not callable(loss):
        raise UsageError("loss must be a function loss(model, samples), or None")
    if session in _attached:
        raise UsageError(
            "this session has a model already: put the models into one nn.Module, with one optimizer"
        )
