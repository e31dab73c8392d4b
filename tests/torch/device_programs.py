"""Random programs of collectives that run in host memory or on a fake device, and must give the same bits."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from fake_device import FakeDevice
from modelled_ranks import options

from bml.torch.process_group import ProcessGroup

N_CALLS = 8


class Host:
    """Host memory: what a program does there is done at once."""

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        return values.clone(memory_format=torch.preserve_format)

    def compute(self, function: Callable[[], Any]) -> None:
        function()

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def stream(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def mark(self) -> None:
        pass

    def follow(self, mark: Any) -> None:
        pass


class OneDevice:
    """The devices of a process that has one."""

    def __init__(self, device: FakeDevice):
        self.device = device

    def find(self, tensor: torch.Tensor) -> FakeDevice | None:
        return self.device if self.device.holds(tensor) else None


class Mailbox:
    """Messages between ranks of one process."""

    def __init__(self) -> None:
        self._sent: dict[Any, deque[Any]] = {}
        self._awaited: dict[Any, deque[Any]] = {}

    def of(self, rank: int) -> Any:
        """The messenger of a rank."""
        box = self

        class Messenger:
            def begin_send(self, array: Any, to: int, tag: int = 0) -> Future[int]:
                return box.put(box._sent, box._awaited, (rank, to, tag), array)

            def begin_recv(self, array: Any, source: int, tag: int = 0) -> Future[int]:
                return box.put(box._awaited, box._sent, (source, rank, tag), array)

        return Messenger()

    def put(self, mine: dict[Any, Any], others: dict[Any, Any], key: Any, array: Any) -> Future[int]:
        future: Future[int] = Future()
        waiting = others.get(key)
        if not waiting:
            mine.setdefault(key, deque()).append((array, future))
            return future
        array_of_other, future_of_other = waiting.popleft()
        sent, into = (array, array_of_other) if mine is self._sent else (array_of_other, array)
        into[:] = sent
        for each in (future, future_of_other):
            each.set_result(key[0])
        return future


@dataclass(eq=False)
class Chain:
    """Calls that nobody has waited for, the later ones of tensors of the earlier ones."""

    works: list[Any]
    results: list[torch.Tensor]
    is_everywhere: bool
    """Whether all ranks have such results, and so may go on with them."""


class Program:
    """One rank's part of a program that a seed draws: the same calls on all ranks, other values on each."""

    def __init__(self, seed: int, group: ProcessGroup, place: Host | FakeDevice, n_calls: int = N_CALLS):
        self._drawn = random.Random(seed)
        self._group, self._place = group, place
        self._values = torch.Generator().manual_seed(1000 * seed + group.rank())
        self._n_calls = n_calls
        self._pending: list[Chain] = []
        self._drawn_on: list[Chain] = []
        """The chains that the call that is being made goes on."""
        self._goes_on = False
        self._seen: list[tuple[torch.Tensor, Any]] = []
        """What the device read of results, and of outputs before their calls; since when it is there."""

    def run(self) -> list[torch.Tensor]:
        """Make all calls; returns the values of all results."""
        for _ in range(self._n_calls):
            elsewhere = self._drawn.random() < 0.3
            self._goes_on = not elsewhere  # another stream has not followed what this one computed
            with self._place.stream() if elsewhere else nullcontext():
                self._begin(self._drawn.choice(CALLS))
                while self._pending and (elsewhere or self._drawn.random() < 0.6):
                    self._end(self._drawn.randrange(len(self._pending)))
        while self._pending:
            self._end(0)
        for _, mark in self._seen:
            self._place.follow(mark)
        return [self._place.read(each) for each, _ in self._seen]

    def _begin(self, call: Callable[[Program], tuple[Any, list[torch.Tensor]]]) -> None:
        self._drawn_on = []
        work, results = call(self)
        before = self._drawn_on
        works = [each for chain in before for each in chain.works]
        known = [each for chain in before for each in chain.results]
        fresh = [each for each in results if not any(each is one for one in known)]
        self._pending = [each for each in self._pending if each not in before]
        self._pending.append(Chain([*works, work], [*known, *fresh], call is not Program.gather))

    def _end(self, number: int) -> None:
        chain = self._pending.pop(number)
        self._drawn.shuffle(chain.works)
        for work in chain.works:
            if self._drawn.random() < 0.5:
                work.wait()
            else:
                work.get_future().wait()
        results = chain.results
        after = [self._place.tensor(torch.zeros(each.shape, dtype=each.dtype)) for each in results]
        for each, copied in zip(results, after, strict=True):
            self._place.compute(lambda each=each, copied=copied: copied.copy_(each))
            self._place.compute(lambda each=each: each.zero_())  # as somebody who uses the memory again
        self._seen += [(each, self._place.mark()) for each in after]

    # --- what it computes --------------------------------------------------------------------------

    def given(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor that the device computes: of any strides, and read by the device up to the call.

        Or one to which a call that nobody has waited for still gives its values.
        """
        if self._goes_on and self._drawn.random() < 0.4:
            found = [
                (chain, each)
                for chain in self._pending
                for each in chain.results
                if chain.is_everywhere and each.shape == shape and each.dtype is dtype
            ]
            if found:
                chain, each = self._drawn.choice(found)
                if chain not in self._drawn_on:
                    self._drawn_on.append(chain)
                return each
        values = torch.randint(-50, 50, shape, generator=self._values).to(dtype)
        if len(shape) > 1 and self._drawn.random() < 0.3:
            values = values.t().contiguous().t()
        made = self._place.tensor(values)
        self._place.compute(lambda: made.mul_(3))
        return made

    def empty(self, n: int, shape: tuple[int, ...] = (3,)) -> list[torch.Tensor]:
        """Outputs that the device still reads when they are given to a call."""
        made = [self._place.tensor(torch.full(shape, 7.0)) for _ in range(n)]
        kept = self._place.tensor(torch.zeros(shape))
        for each in made:
            self._place.compute(lambda each=each: kept.add_(each))
        self._seen.append((kept, self._place.mark()))
        return made

    def shape(self) -> tuple[int, ...]:
        """Any shape."""
        return self._drawn.choice([(5,), (2, 3), (), (0,), (4, 2)])

    def dtype(self) -> torch.dtype:
        """Any dtype that can be added."""
        return self._drawn.choice([torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int8])

    # --- the calls ---------------------------------------------------------------------------------

    def all_reduce(self) -> tuple[Any, list[torch.Tensor]]:
        tensor = self.given(self.shape(), self.dtype())
        op = self._drawn.choice(["SUM", "MAX", "PRODUCT"])
        return self._group.allreduce([tensor], options(dist.AllreduceOptions, op)), [tensor]

    def all_reduce_bits(self) -> tuple[Any, list[torch.Tensor]]:
        tensor = self.given((6,), torch.int32)
        return self._group.allreduce([tensor], options(dist.AllreduceOptions, "BXOR")), [tensor]

    def all_reduce_coalesced(self) -> tuple[Any, list[torch.Tensor]]:
        tensors = [self.given((n,)) for n in (3, 1, 4)]
        return self._group.allreduce_coalesced(tensors), tensors

    def reduce(self) -> tuple[Any, list[torch.Tensor]]:
        tensor = self.given((5,))
        return self._group.reduce([tensor], options(dist.ReduceOptions, "SUM", self._root())), [tensor]

    def broadcast(self) -> tuple[Any, list[torch.Tensor]]:
        tensor = self.given(self.shape(), self.dtype())
        return self._group.broadcast([tensor], options(dist.BroadcastOptions, root=self._root())), [tensor]

    def all_gather(self) -> tuple[Any, list[torch.Tensor]]:
        outputs = self.empty(self._group.size())
        return self._group.allgather([outputs], [self.given((3,))]), outputs

    def all_gather_single(self) -> tuple[Any, list[torch.Tensor]]:
        (output,) = self.empty(1, (self._group.size(), 3))
        return self._group.all_gather_single(output, self.given((3,))), [output]

    def reduce_scatter(self) -> tuple[Any, list[torch.Tensor]]:
        (output,) = self.empty(1)
        inputs = [self.given((3,)) for _ in range(self._group.size())]
        return self._group.reduce_scatter([output], [inputs]), [output]

    def reduce_scatter_single(self) -> tuple[Any, list[torch.Tensor]]:
        (output,) = self.empty(1)
        return self._group.reduce_scatter_single(output, self.given((3 * self._group.size(),))), [output]

    def gather(self) -> tuple[Any, list[torch.Tensor]]:
        root = self._root()
        made = self.empty(self._group.size())
        outputs = made if self._group.rank() == root else []
        given = options(dist.GatherOptions, root=root)
        return self._group.gather([outputs] if outputs else [], [self.given((3,))], given), outputs

    def scatter(self) -> tuple[Any, list[torch.Tensor]]:
        root = self._root()
        (output,) = self.empty(1)
        inputs = [self.given((3,)) for _ in range(self._group.size())]
        given = [inputs] if self._group.rank() == root else []
        return self._group.scatter([output], given, options(dist.ScatterOptions, root=root)), [output]

    def all_to_all(self) -> tuple[Any, list[torch.Tensor]]:
        n = self._group.size()
        outputs = self.empty(n)
        return self._group.alltoall(outputs, [self.given((3,)) for _ in range(n)]), outputs

    def all_to_all_single(self) -> tuple[Any, list[torch.Tensor]]:
        n = self._group.size()
        (output,) = self.empty(1, (2 * n,))
        return self._group.all_to_all_single(output, self.given((2 * n,)), [], []), [output]

    def _root(self) -> int:
        return self._drawn.randrange(self._group.size())


CALLS = [
    *(Program.all_reduce, Program.all_reduce_bits, Program.all_reduce_coalesced, Program.reduce),
    *(Program.broadcast, Program.all_gather, Program.all_gather_single),
    *(Program.reduce_scatter, Program.reduce_scatter_single, Program.gather, Program.scatter),
    *(Program.all_to_all, Program.all_to_all_single),
]
