"""One rank of a group whose ranks send messages to each other, for tests; see rank_program.py."""

import json
import os
import signal
import sys
import time

import numpy as np
from file_store import FileStore

from bml.cluster.formation.group import Group, form
from bml.cluster.formation.point_to_point import ANY
from bml.errors import BmlError


def say(**what: object) -> None:
    print(json.dumps(what | {"at": time.monotonic()}), flush=True)


def vector(source: int, to: int, n: int) -> np.ndarray:
    return np.random.default_rng([source, to, n]).standard_normal(n, np.float32)


def all_pairs(group: Group) -> bool:
    """Every rank sends to every other, short and long; all at once. Returns whether all came right."""
    rank, sizes, right = group.rank, (1, 1000, 1_500_000), True
    others = [other for other in range(group.size) if other != rank]
    sending = [group.begin_send(vector(rank, to, n), to, n) for n in sizes for to in others]
    for n in sizes:
        for source in others:
            found = np.empty(n, np.float32)
            right &= group.recv(found, source, n) == source
            right &= np.array_equal(found, vector(source, rank, n))
    right &= [each.result(20) for each in sending] == others * len(sizes)
    return right


def main() -> None:
    folder, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    group = form(FileStore(folder), rank, size)
    second = form(FileStore(os.path.join(folder, "bml-second")), rank, size)
    say(pairs=all_pairs(group), second=all_pairs(second))
    one = np.zeros(1, np.int64)
    if rank == 0:
        sources = sorted(group.recv(one, ANY, 9) for _ in range(size - 1))
        say(any=sources)
    else:
        group.send(np.array([rank]), 0, 9)
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for call in (lambda: group.recv(one, size - 1, 5), lambda: group.send(one, size - 1, 5)):
        began_s = time.monotonic()
        try:
            call()
        except BmlError as error:
            say(error=f"{type(error).__name__}: {error}", took_s=time.monotonic() - began_s)
    say(after=all_of(group, range(size - 1)))
    second.close()
    group.close()


def all_of(group: Group, ranks: range) -> bool:
    """A message goes round these ranks."""
    rank, n = group.rank, len(ranks)
    token = np.array([rank])
    sending = group.begin_send(token.copy(), (rank + 1) % n)
    group.recv(token, (rank - 1) % n)
    sending.result(20)
    return bool(token[0] == (rank - 1) % n)


if __name__ == "__main__":
    main()
