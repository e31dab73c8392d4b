"""A Ray of this process on this machine: it is started for its jobs, and removed without a trace."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
from contextlib import suppress

import psutil
import ray

from bml.cluster.fleets.fork_server import LONG_COPIES
from bml.cluster.fleets.ownfolder import OwnFolder
from bml.cluster.process.imports import what_we_import
from bml.cluster.ray import auth as ray_auth
from bml.cluster.ray import environment
from bml.errors import StartError

NAMESPACE = "bml"
OBJECT_STORE_NBYTES = 100 << 20
"""Bytes of the object store of a Ray that is started here: no data of a job passes through it."""

_SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
#: In a folder with a longer name Ray's sockets would have longer names than sockets can have.
_MOST_FOLDER = 26
#: Where Ray looks for the way out of this machine.
_OUTSIDE = ("8.8.8.8", 53)
#: Not 127.0.0.1, in the place of which Ray looks for another address.
_LOOPBACK = "127.0.0.2"
#: How long processes of a Ray that did not come up may take to end when they are killed, in seconds.
_ENDING_S = 3.0


class OwnRay:
    """Starts a Ray with a token of its own, and this process as its driver; `stop` ends it.

    Raises StartError if Ray does not come up; nothing of it is left then.
    """

    def __init__(self, prints: bool):
        place = tempfile.gettempdir()
        self._folder = OwnFolder("bml-ray-", place if len(place) <= _MOST_FOLDER else "/tmp")
        defaults = {name: text for name, text in (_SETTINGS | LONG_COPIES).items() if name not in os.environ}
        try:
            # Its processes inherit these variables; this process does not keep them.
            with ray_auth.private(), environment.added(defaults | what_we_import()):
                ray.init(
                    address="local",
                    namespace=NAMESPACE,
                    include_dashboard=False,
                    logging_level=logging.ERROR,
                    object_store_memory=OBJECT_STORE_NBYTES,
                    log_to_driver=prints,
                    _node_ip_address=_address(),
                    _temp_dir=self._folder.path,
                )
        except BaseException as error:
            self._end_half_started()
            self.stop()
            if not isinstance(error, Exception):
                raise
            raise StartError(
                f"Ray cannot be started on this machine, or is too slow there: {error} (the launcher "
                "`processes` does without Ray)"
            ) from error

    def _end_half_started(self) -> None:
        """End the processes of a Ray that did not come up: Ray leaves them until this process ends."""
        if ray.is_initialized():
            return
        left = [each for each in psutil.Process().children(recursive=True) if self._is_ours(each)]
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, _ENDING_S)

    def _is_ours(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            return any(self._folder.path in each for each in process.cmdline())
        return False

    def stop(self) -> None:
        """End it, and remove its folder. Idempotent."""
        if ray.is_initialized():
            ray.shutdown()
        ray_auth.forget()
        self._folder.remove()


def _address() -> str | None:
    """Return an address for Ray's node where this machine has no route out; else None: Ray finds one.

    Ray looks for the route to 8.8.8.8, and warns on standard error where there is none.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_OUTSIDE)  # no packet is sent
        except OSError:
            return _LOOPBACK
    return None
