"""How much is fuzzed, and how bytes are damaged, from a seed."""

from __future__ import annotations

import random

#: How many cases each test tries; together more than 100,000.
CASES = {
    "handshakes": 20_000,
    "heartbeats": 10_000,
    "headers": 30_000,
    "frames to a server": 30_000,
    "frames to a learner": 30_000,
    "control messages": 20_000,
    "texts": 10_000,
}
EDGES = (0, 1, 2, 5, 9, 10, 11, 255, 4096, 4097, 2**16 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)


def damaged(chance: random.Random, data: bytes) -> bytes:
    """Some bytes changed, cut off, doubled, moved or made up; now and then none."""
    how = chance.randrange(8)
    changed = bytearray(data)
    if how <= 2:
        for _ in range(chance.randrange(1, 4)):
            if changed:
                changed[chance.randrange(len(changed))] = chance.randrange(256)
    elif how == 3:
        del changed[chance.randrange(len(changed) + 1) :]
    elif how == 4:
        at = chance.randrange(len(changed) + 1)
        changed[at:at] = chance.randbytes(chance.randrange(1, 40))
    elif how == 5:
        changed += changed[: chance.randrange(len(changed) + 1)]
    elif how == 6:
        changed = bytearray(chance.randbytes(chance.randrange(300)))
    return bytes(changed)
