"""Parts with priorities in random programs: they are waited for in the next iteration, or by the session.

What follows such a step is exact in any order: the gradient of a batch is computed when all that it depends
on was waited for, and the other steps add whole numbers to the momentum.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

_ADD = "lambda mean: momentum.__iadd__(mean)"
LATE_STEP = f"session.allreduce_async(np.ones(3), 'avg', priority=1, then={_ADD})"
"""A line for any loop."""
_OTHERS = (
    "{batch}.allreduce_async(np.full(3, 2.0 * len({batch}.indices)), "
    "recompute=lambda i: np.full(3, 2.0 * len(i)), priority={priority}, then={add})",
    "session.allreduce_async(np.arange(3), 'avg', priority={priority}, then={add})",
    "session.allreduce_async(np.arange(3), 'max', priority={priority}, then={add})",
    "session.allreduce_async(np.ones(3), 'prod', priority={priority}, then={add})",
    "session.allreduce_async([np.ones(1), np.ones(5)], 'min', priority={priority})",
)


def late_parts(chance: random.Random, batch: str, late: str) -> Iterator[str]:
    """The lines of a step of training; `late` is the list of the handles of the iteration before."""
    yield f"for handle in {chance.choice([late, f'reversed({late})'])}:"
    yield "    handle.wait()"
    yield f"{late} = []"
    yield "old = [x.copy() for x in w]"
    yield f"for layer in {chance.choice(['(0, 1)', '(1, 0)'])}:"
    yield "    def again(i, layer=layer, old=old):"
    yield "        return gradient(layer, i, old)"
    yield "    def then(mean, layer=layer):"
    yield "        w[layer] -= mean"
    yield f"    part = {batch}.allreduce_async(again({batch}.indices), recompute=again,"
    yield f"                           priority={chance.choice(['layer', '-layer', '0'])}, then=then)"
    yield f"    {late}.append(part)"
    for _ in range(chance.randint(0, 3)):
        line = chance.choice([_OTHERS[0], *_OTHERS])
        yield line.format(batch=batch, priority=chance.randint(-3, 9), add=_ADD)
    if chance.random() < 0.3:
        yield f"if session.server == {chance.randint(0, 3)}:  # it reads now what the others read later"
        yield f"    for handle in {late}:"
        yield "        handle.wait()"
