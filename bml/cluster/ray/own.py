"""A Ray of this process on this machine: it is started for its jobs, and removed without a trace."""

from __future__ import annotations

import logging
import os
import tempfile

import ray

from bml.cluster.fleets.fork_server import LONG_COPIES
from bml.cluster.fleets.ownfolder import OwnFolder
from bml.cluster.process.imports import what_we_import
from bml.cluster.ray import auth as ray_auth
from bml.cluster.ray import environment

NAMESPACE = "bml"
OBJECT_STORE_NBYTES = 100 << 20
"""Bytes of the object store of a Ray that is started here: no data of a job passes through it."""

_SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
#: In a folder with a longer name Ray's sockets would have longer names than sockets can have.
_MOST_FOLDER = 26


class OwnRay:
    """Starts a Ray with a token of its own, and this process as its driver; `stop` ends it."""

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
                    _temp_dir=self._folder.path,
                )
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End it, and remove its folder. Idempotent."""
        if ray.is_initialized():
            ray.shutdown()
        ray_auth.forget()
        self._folder.remove()
