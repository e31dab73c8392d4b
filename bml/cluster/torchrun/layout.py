"""The ranks of a job: their numbers, their environment and their command. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bml.errors import UsageError

THREADS = "OMP_NUM_THREADS"
ROLE = "default"
"""The role of every rank: that of torchrun, if none is given."""


@dataclass(frozen=True)
class Layout:
    """The ranks of all nodes, as seen by one of them.

    Attributes:
        sizes: number of ranks of each node, by the rank of the node.
        node: rank of this node.
        run_id: name of the job.
        master: host and port of the store.
        max_restarts: how often each rank is started again.
    """

    sizes: tuple[int, ...]
    node: int
    run_id: str
    master: tuple[str, int]
    max_restarts: int = 0

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return sum(self.sizes)

    @property
    def ranks(self) -> range:
        """The ranks of this node."""
        first = sum(self.sizes[: self.node])
        return range(first, first + self.sizes[self.node])

    def environment(self, rank: int, restarts: int, threads: int | None) -> dict[str, str]:
        """Return the variables of a rank of this node that was started again `restarts` times.

        They are those of torchrun. The store is the launcher's in every incarnation of a rank, so that the
        death of rank 0 does not end it. `threads` is the number of OpenMP threads; None leaves it open.
        """
        world = str(self.world_size)
        found = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank - self.ranks.start),
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": str(self.sizes[self.node]),
            "GROUP_RANK": str(self.node),
            "GROUP_WORLD_SIZE": str(len(self.sizes)),
            "ROLE_NAME": ROLE,
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": world,
            "MASTER_ADDR": self.master[0],
            "MASTER_PORT": str(self.master[1]),
            "TORCHELASTIC_RUN_ID": self.run_id,
            "TORCHELASTIC_RESTART_COUNT": str(restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(self.max_restarts),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        return found if threads is None else {**found, THREADS: str(threads)}


def threads_of(n_cores: int, n_ranks: int, environment: Mapping[str, str]) -> int | None:
    """Return how many OpenMP threads each of the ranks of a node gets: its share of the cores, 1 at least.

    None if the user has decided it, or one rank has the node for itself.
    """
    if n_ranks == 1 or environment.get(THREADS):
        return None
    return max(1, n_cores // n_ranks)


def command_of(
    script: str, arguments: Sequence[str], python: str, module: bool = False, no_python: bool = False
) -> list[str]:
    """Return the command of every rank: a script or a module for `python`, or a program.

    Raises UsageError for a program that is to be a module.
    """
    if no_python and module:
        raise UsageError("--no-python and --module do not go together: a module needs Python")
    if no_python:
        return [script, *arguments]
    # Unbuffered, as torchrun does it: the last prints of a rank that is killed are not lost.
    return [python, "-u", *(["-m"] if module else []), script, *arguments]


def read_endpoint(text: str, default_port: int) -> tuple[str, int]:
    """Read `host:port`, `[ipv6]:port` or `host`. Raises UsageError for anything else."""
    wrong = UsageError(f"'{text}' is no endpoint: write it like 10.0.0.1:29500, with a port below 65536")
    if text.startswith("["):
        host, closed, port = text[1:].partition("]")
        if not closed or (port and not port.startswith(":")):
            raise wrong
        port = port[1:]
    elif text.count(":") > 1:  # an address of IPv6 without a port
        host, port = text, ""
    else:
        host, _, port = text.partition(":")
    if not host or (port and not (port.isascii() and port.isdigit())):
        raise wrong
    number = int(port) if port else default_port
    if number > 65535:
        raise wrong
    return host, number
