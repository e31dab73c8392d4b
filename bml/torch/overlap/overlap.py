"""Communication of one batch under the forward pass of the next: the parts, and when each has its turn."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from bml.torch.overlap.before import Before
from bml.torch.overlap.guard import BeforeForward, guard, release
from bml.torch.overlap.late_steps import LateSteps, Summed
from bml.torch.overlap.order import Order
from bml.torch.overlap.support import check_modules, check_optimizer, check_parameters
from bml.train.batch import Batch
from bml.train.session import Session

KEY = "bml.torch order of buckets"
"""The name of the order of buckets in the training state."""


class Overlap:
    """The late steps of one model, and the order of its buckets, which the first batch tells.

    Raises UsageError for optimizers, modules and parameters of which this would not be the same.
    """

    def __init__(
        self,
        session: Session,
        model: nn.Module,
        optimizer: Any,
        buckets: Sequence[Summed],
        before: Before,
        keeps: bool,
    ):
        check_optimizer(optimizer)
        check_modules(model)
        check_parameters([(str(each.name), each.parameter) for bucket in buckets for each in bucket.members])
        self._buckets = buckets
        self._is_noting = False
        self._steps = LateSteps(model, optimizer, buckets, before, keeps)
        self._order = Order(session, len(buckets))
        session.state_fn(KEY, self._order.load, self._order.save)
        numbers = {id(each): number for number, bucket in enumerate(buckets) for each in bucket.parameters}
        for module in model.modules():
            own = [numbers[id(each)] for each in module.parameters(recurse=False) if id(each) in numbers]
            if own:
                hook = BeforeForward(partial(self._before_forward, tuple(dict.fromkeys(own))))
                module.register_forward_pre_hook(hook, prepend=True)

    @property
    def is_stepping(self) -> bool:
        """Whether a step of the optimizer is one that was late, and not the user's."""
        return self._steps.is_stepping

    @property
    def knows_order(self) -> bool:
        """Whether the first batch has told the order of the buckets: from then on steps are late."""
        return self._order.priorities is not None

    def count_hooks(self) -> None:
        """All hooks that the optimizer has now may be called for every bucket."""
        self._steps.count_hooks()

    def open(self) -> None:
        """Begin a batch. In the first one the order is noted in which its forward pass uses buckets."""
        if self.knows_order:
            return
        self._order.forget()
        self._is_noting = True
        for number, bucket in enumerate(self._buckets):
            for parameter in bucket.parameters:
                guard(parameter, partial(self._note, number))

    def begin_sums(self, batch: Batch, has_loss: bool) -> None:
        """The forward pass of a batch is over, and its first sums begin: nothing of the last one is late."""
        self._steps.take_rest()
        if not self.knows_order:
            self._release()
            self._order.begin(batch, has_loss)

    def terms(self, number: int) -> dict[str, Any]:
        """How the part of a bucket is begun."""
        if self._order.priorities is None:
            return {}
        return {
            "priority": self._order.priorities[number],
            "then": partial(self._steps.arrived, number),
        }

    @property
    def first_terms(self) -> dict[str, Any]:
        """How a part is begun that is waited for before all buckets."""
        return {"priority": 0} if self.knows_order else {}

    def finish(self) -> None:
        """The sums of a batch were waited for."""
        self._order.finish()

    def defer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See LateSteps."""
        self._steps.defer(args, kwargs)

    def take_all(self) -> None:
        """See LateSteps."""
        self._steps.take_all()

    def close(self) -> None:
        """The loop has ended. What is still late cannot come any more: the use of it is an error."""
        if not self._steps.are_late:
            self._release()

    def _before_forward(self, numbers: tuple[int, ...]) -> None:
        for number in numbers:
            if self._is_noting:
                self._note(number)
            self._steps.take(number)

    def _note(self, number: int) -> None:
        self._order.note(number)
        for parameter in self._buckets[number].parameters:
            release(parameter)

    def _release(self) -> None:
        self._is_noting = False
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                release(parameter)
