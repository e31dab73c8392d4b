"""A communication hook of DDP: survivors compute the samples of lost ranks, so that no share is lost.

The hook reduces each bucket as one step. Where a rank is lost, each survivor adds the gradients of its part
of that rank's samples. It knows them from the sampler, and computes them by the user's loss in its training
thread. So the sums are those of all ranks, whichever ranks are left.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from bml.topology.errors import UsageError
from bml.torch.attached.memory import Named
from bml.torch.attached.recompute import LEAST_COMPARED, Loss, Recompute, are_alike
from bml.torch.process_group import ProcessGroup
from bml.torch.recomputing.backward import Backward
from bml.torch.recomputing.loader import LoaderShares
from bml.torch.recomputing.passes import Drawn, Passes
from bml.torch.work import this_backward
from bml.train.ledger import LoopLedger

_log = logging.getLogger("bml.torch")


def recompute_hook(ddp: Any, loss: Loss) -> RecomputeHook:
    """Let the samples of lost ranks be computed by the others; returns the hook, with which to draw batches.

    `ddp` is a DistributedDataParallel in a group of the backend bml, with no other communication hook.
    `loss(model, samples)` computes the loss of collated samples with `model`, which is `ddp.module`, as the
    training loop does: the mean over the samples as a tensor with one number, with the factors of gradient
    accumulation and of a GradScaler, if there are any, and under its autocast. It is called for any samples
    of the data set. Call `recompute_hook` on every rank before training, and draw batches by
    `hook.batches(loader)`.

    Raises UsageError for another backend, for a model that has a communication hook or SyncBatchNorm, and for
    one that is not in host memory.
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise UsageError(f"recompute_hook takes a DistributedDataParallel, not a {type(ddp).__name__}")
    if not callable(loss):
        raise UsageError("loss must be a function loss(model, samples)")
    group = ddp.process_group
    if not isinstance(group, ProcessGroup):
        raise UsageError(
            "the group of the model is not of the backend bml: "
            'call init_process_group("bml") before DistributedDataParallel'
        )
    check_model(ddp.module)
    hook = RecomputeHook(group, ddp.module, loss)
    try:
        ddp.register_comm_hook(None, lambda state, bucket: hook.reduce(bucket))
    except (RuntimeError, ValueError) as error:
        raise UsageError(
            f"the model takes no communication hook, it may have one already: {error}"
        ) from error
    ddp.register_forward_pre_hook(lambda module, given: hook.forwarded(module.require_backward_grad_sync))
    ddp.register_forward_hook(lambda module, given, made: hook.follow(made))
    key = id(hook)
    _hooks[key] = weakref.ref(hook, lambda _: _hooks.pop(key, None))
    return hook


def check_model(model: Any) -> None:
    """Raise UsageError unless one rank alone can compute others' samples with it, in host memory."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.SyncBatchNorm):
            raise UsageError(
                f"the module {name!r} is a SyncBatchNorm: it waits for other ranks in its forward pass, "
                "and samples of lost ranks are computed by one rank alone; make it a BatchNorm"
            )
    for name, parameter in model.named_parameters():
        if not parameter.is_cpu:
            raise UsageError(
                f"the parameter {name!r} is on {parameter.device}: recompute_hook computes in host memory "
                "alone; call model.cpu(), or train without the hook"
            )


_hooks: dict[int, weakref.ref[RecomputeHook]] = {}


def _before_step(optimizer: Any, args: Any, settings: Any) -> None:
    """Let all hooks look at a step of an optimizer before it changes anything."""
    for watched in list(_hooks.values()):
        hook = watched()
        if hook is not None:
            hook.before_step(optimizer)


# Once, for all hooks: a step iterates over torch's mapping of such functions, and fails if one comes or goes
# meanwhile, as it would where a hook is collected or made during a step.
register_optimizer_step_pre_hook(_before_step)


class RecomputeHook:
    """The communication hook of one model on one rank; `recompute_hook` makes it.

    It has `state_dict` and `load_state_dict` for `bml.torch.resumable(ddp, optimizer, hook=hook)`.
    """

    def __init__(self, group: ProcessGroup, model: Any, loss: Loss):
        trained = [Named(*each) for each in model.named_parameters() if each[1].requires_grad]
        self._group = group
        self._recompute = Recompute(model, loss, trained)
        self._numbers = {id(each.parameter): number for number, each in enumerate(trained)}
        self._names = [each.name for each in trained]
        self._parameters = [each.parameter for each in trained]
        self._passes = Passes()
        self._backward: Backward | None = None
        self._is_compared = group.joins
        self._n_lost = 0
        self._failed: BaseException | None = None
        self._made: set[int] = set()
        """The numbers of the parameters whose gradients were made since the last reduction."""
        self._syncs = True
        """Whether the gradients of the last loss are to be reduced: not under `no_sync`."""
        self._keeps = False
        """Whether the gradients of the last reduction were still there then."""
        # By the nodes that add to gradients: those of parameters are also called by torch.autograd.grad.
        self._accumulators = [_accumulator(each.parameter) for each in trained]
        for each, accumulator in zip(trained, self._accumulators, strict=True):
            accumulator.register_prehook(partial(self._note_made, each.parameter))

    def batches(self, loader: Any) -> Iterator[Any]:
        """Iterate over the batches of a DataLoader, and know whose samples the other ranks have.

        The sampler is a DistributedSampler, or another one with `rank` and `num_replicas` that goes by them
        when it is iterated over; batches are made of `batch_size`. All ranks draw the same number of batches
        of the same size. Raises UsageError for other loaders, and if the last batches were accumulated and
        not reduced.
        """
        passes = self._passes
        shares = LoaderShares(loader, self._group.rank(), self._group.size())
        passes.begin(shares)
        try:
            for index, samples in enumerate(loader):
                passes.draw(shares, index)
                yield samples
            self._look_for_dropped()
            passes.finish()
        finally:
            if passes.is_open(shares):  # else this is an older pass, that ends late
                if self._backward is not None:  # it raised an error, or did not reach all buckets
                    self._backward.leave()
                passes.end()

    def samples(self) -> LoopLedger:
        """Which samples are in the sums, by pass over a loader; alike on all ranks.

        Samples are the places in the order of the sampler: one that the sampler gives twice counts as two.
        """
        return self._passes.ledger.summary()

    def state_dict(self) -> dict[str, Any]:
        """What a rank that joins is given between two batches."""
        saved: dict[str, Any] = self._passes.save()
        return saved

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `state_dict` returned on another rank."""
        self._passes.load(state)

    def forwarded(self, syncs: bool = True) -> None:
        """Note that the model is called; with gradients, that is the last batch's loss.

        `syncs`: backward will reduce the gradients, as it does but under `no_sync`.
        Raises UsageError inside of `loss`, which is given the model to call, and after a backward pass that
        did not reach all buckets.
        """
        if self._backward is None:
            if torch.is_grad_enabled():
                self._syncs = syncs
                self._passes.forwarded()
        elif self._backward.is_computing:
            raise UsageError(
                "loss(model, samples) called the DistributedDataParallel: call the model that it is given"
            )
        else:
            self._failed = UsageError(
                "the backward pass before did not end: it raised an error, or a parameter got no gradient "
                "(give DistributedDataParallel find_unused_parameters=True then); this rank cannot go on"
            )
            self._backward.leave()
            raise self._failed

    def follow(self, made: Any) -> None:
        """Note in which backward pass gradients come to what the model has made of the last batch.

        A loop may add the losses of several batches before it calls backward, or skip one for good.
        """
        if self._passes.drawn and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            note = partial(_note_backward, self._passes.drawn[-1])
            for each in tree_leaves(made):
                if isinstance(each, torch.Tensor) and each.requires_grad:
                    each.register_hook(note)

    def before_step(self, optimizer: Any) -> None:
        """Raise UsageError if an optimizer is about to use gradients of the model that were not reduced.

        DDP itself would say so in the next forward pass, when each rank has used its own gradients.
        """
        drawn = self._passes.drawn
        if not (self._made and self._syncs and drawn and drawn[-1].is_forwarded):
            return
        if not any(id(each) in self._numbers for group in optimizer.param_groups for each in group["params"]):
            return
        missing = [name for number, name in enumerate(self._names) if number not in self._made]
        why = "backward raised an error"
        if missing:
            why = (
                f"the parameters {', '.join(missing)} got none: backward raised an error, or the loss does "
                "not depend on them (give DistributedDataParallel find_unused_parameters=True then)"
            )
        self._failed = UsageError(
            f"optimizer.step() with gradients that were not reduced, as {why}. The model is that of the last "
            "step, and this rank cannot go on"
        )
        raise self._failed

    def reduce(self, bucket: Any) -> Any:
        """Reduce a torch.distributed.GradBucket; DDP calls it in backward, for one bucket after the other.

        Returns a torch.futures.Future of its buffer. For the last bucket it returns when all are reduced, as
        the samples of lost ranks are computed in the training thread. Raises UsageError outside of a loop
        over `batches`, the error of the user's loss, and the error that ended the group.
        """
        if self._failed is not None:
            raise self._failed
        try:
            return self._reduce(bucket)
        except BaseException as error:
            # DDP takes no further backward, and a next step of this rank would be taken for this one.
            self._failed = error
            if self._backward is not None:
                self._backward.leave()
            raise

    def _reduce(self, bucket: Any) -> Any:
        if self._backward is None:
            self._backward = self._begin()
            self._backward.begin()
        found = self._backward.add(bucket, measures=not self._is_compared)
        if bucket.is_last():
            if not self._is_compared:
                self._compare(self._backward)
            self._backward.finish()
            self._passes.commit(self._backward.contributors)
            self._tell_losses(self._backward.contributors)
            self._backward = None
            self._made.clear()
        return found

    def _note_made(self, parameter: Any, _: Any) -> None:
        """Called by autograd before it adds to the gradient of a parameter."""
        if new := self._passes.without_gradients(this_backward()):
            self._look_for_dropped()
            for each in new:
                each.has_gradients = True
        if not self._made:
            kept = parameter.grad
            self._keeps = kept is not None and bool(kept.any())
        self._made.add(self._numbers[id(parameter)])

    def _look_for_dropped(self) -> None:
        """Leave out the batches that were accumulated if the loop has dropped their gradients since."""
        if self._made and all(self._parameters[number].grad is None for number in self._made):
            self._passes.drop_gradients()
            self._made.clear()

    def _begin(self) -> Backward:
        drawn = self._passes.with_gradients()
        if not drawn:
            raise UsageError(
                "backward of the DistributedDataParallel without a batch whose samples are known: call it in "
                "`for samples in hook.batches(loader)`, once for each batch, under no_sync for the others"
            )
        if self._keeps:
            raise UsageError(
                "the gradients of the last reduction are there still, and would be summed again: call "
                "optimizer.zero_grad() before the next backward, and accumulate batches under no_sync"
            )
        return Backward(self._group, self._recompute, self._numbers, drawn)

    def _compare(self, backward: Backward) -> None:
        """Compare the first gradient with that of `loss`: one may be a sum, the other one a mean."""
        n_samples = self._passes.drawn[-1].share_size
        self._is_compared = n_samples < LEAST_COMPARED
        if self._is_compared:
            return
        found, wanted = backward.norms()
        self._is_compared = math.isfinite(found) and math.isfinite(wanted)
        if not self._is_compared:  # as in the first steps of a GradScaler: compare the next ones
            return
        if not are_alike(found, wanted):
            raise UsageError(
                f"the first gradient has the norm {found:.3g}, but that of `loss` over the same {n_samples} "
                f"samples of this rank has the norm {wanted:.3g}: let loss(model, samples) return what the "
                'training loop calls backward of, the mean over the samples (reduction="mean")'
            )

    def _tell_losses(self, contributors: tuple[int, ...]) -> None:
        lost = sorted(set(range(self._group.size())) - set(contributors))
        if len(lost) > self._n_lost and self._group.rank() == min(contributors):
            _log.warning("the samples of the lost ranks %s are computed by the others", lost)
        self._n_lost = len(lost)


def _note_backward(drawn: Drawn, _: Any) -> None:
    """Called by autograd, also by torch.autograd.grad, which makes no gradients of parameters."""
    drawn.backward = this_backward()


def _accumulator(parameter: Any) -> Any:
    """The node of autograd that adds to the gradient of a parameter; it lives as long as it is held."""
    with torch.enable_grad():
        return parameter.view_as(parameter).grad_fn.next_functions[0][0]
