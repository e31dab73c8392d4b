"""The faults that the page offers for each part. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Offer:
    """A fault that can be injected with a click: in `text`, {} stands for the part. `means`: what it does."""

    label: str
    text: str
    means: str


OFFERS: dict[str, tuple[Offer, ...]] = {
    "server": (
        Offer("Kill", "kill:{}", "Its process gets SIGKILL."),
        Offer("Freeze for 3 s", "freeze:{},for=3s", "Its process stands still for three seconds."),
        Offer("Compute slowly for 10 s", "busy:{},for=10s", "It loses half of its time of computation."),
        Offer("Ask to leave", "leave:{}", "It leaves at the end of its iteration; nothing is lost."),
        Offer("Start again", "join:{}", "It is started again, and joins the job, if it is out of it."),
    ),
    "nic": (
        Offer("Cut for 5 s", "cut:{},for=5s", "It loses its cable, and its server notices."),
        Offer("Cut", "cut:{}", "It loses its cable for good, and its server notices."),
        Offer("Silence for 5 s", "blackhole:{},for=5s", "Everything on it is dropped without a word."),
        Offer("Slow for 20 s", "slow:{},rate=10mbit,for=20s", "It carries 10 Mbit/s, each way."),
    ),
    "switch": (
        Offer("Break for 5 s", "switch:{},for=5s", "All its NICs are dead for five seconds."),
        Offer("Break", "switch:{}", "All its NICs are dead for good."),
    ),
    "job": (
        Offer("Kill the coordinator", "coordinator", "Its process gets SIGKILL, and another one takes over."),
    ),
}
"""What can be done to a server, a NIC, a switch (or a cable of a torus), and the job."""
