"""The settings of a simulated run: the job, the machines it runs on and the network between them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bml.protocol.server.learner import KEPT_NBYTES
from bml.schedule.select.model import DEFAULTS, Constants
from bml.sim.world.delays import NONE, Delays

#: Without start-up times even small vectors take trees, which is where most can go wrong.
TREES = replace(DEFAULTS, alpha_s=0.0)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """`steps` steps of all-reduce over vectors of `n_elements` float64; times are in virtual seconds.

    The job: `per_iteration` steps make an iteration of the training loop. `slice_nbytes` is the length of a
    slice. `constants` of the cost model decide which schedule steps of this size take, if `algorithm` is
    auto. `detect_s` and `min_servers` are those of a job. `absent` servers are not there from the beginning.
    `kept_nbytes` is how many bytes of results a learner keeps. With `shared_memory` the servers are on one
    host and reduce directly: of the links only heartbeats are left.

    With `elects` the job has no launcher: its ranks elect who runs the coordinator.

    Its surroundings: a successor of a coordinator takes `restart_s` to start. `reaches`: the launcher can
    kill a coordinator, which it cannot on a machine that it does not reach. A message takes between the two
    times of `delay_s`; `delays` are the slow ways.
    `load_s` is how late a busy host reacts at most (load.py). Each direction of a NIC carries about
    `rate_nbytes_s` bytes per second; 0: without a limit.
    """

    steps: int = 5
    n_elements: int = 41
    per_iteration: int = 1
    slice_nbytes: int = 64
    algorithm: str = "auto"
    constants: Constants = TREES
    detect_s: float = 0.5
    min_servers: int | None = None
    absent: tuple[int, ...] = ()
    kept_nbytes: int = KEPT_NBYTES
    shared_memory: bool = False
    elects: bool = False
    restart_s: float = 0.3
    reaches: bool = True
    delay_s: tuple[float, float] = (0.0001, 0.002)
    delays: Delays = NONE
    load_s: float = 0.0
    rate_nbytes_s: float = 0.0
