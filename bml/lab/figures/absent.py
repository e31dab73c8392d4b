"""What the papers publish and we do not show, and why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Absent:
    """A figure that cannot be had.

    Attributes:
        what: it shows.
        published: what we know of it.
        why: we have nothing to put beside it.
    """

    what: str
    published: str
    why: str


ABSENT = (
    Absent(
        "synchronisation times with RDMA, PFC and DCQCN in a packet-level simulator",
        "not known to us",
        "packet-times has ours, beside which we have only the theory of that setting",
    ),
    Absent(
        "job completion times measured on nine servers with two GPUs each",
        "−18.7 … −56.4 %",
        "there is no such cluster here; job-completion simulates the same fabrics with assumed computation",
    ),
    Absent(
        "synchronisation times measured between RDMA NICs",
        "not known to us",
        "there are no such NICs here; our RDMA runs on soft-RoCE, whose times say nothing of hardware",
    ),
    Absent(
        "behaviour under failures in production traces",
        "not known to us",
        "the traces are not public; more-failures has random sets of dead parts, and bml plan --survey any",
    ),
    Absent(
        "a dead server on a BCube of more than two levels",
        "a formula that we could not read",
        "our generalisation of the schedule is in bml plan --algorithm detour, with nothing to put beside it",
    ),
    Absent(
        "measured times of FlexTree",
        "not known to us",
        "flextree has its cost model, whose constants are those of a machine that we do not have",
    ),
)
"""All of them."""
