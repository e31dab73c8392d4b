"""A Ray of a job's own, on this machine: it is started for the job, and nothing of it is left."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
import threading

import ray

from bml.cluster import ray_auth
from bml.cluster.nursery import LONG_COPIES

NAMESPACE = "bml"
OBJECT_STORE_NBYTES = 100 << 20
"""Of every Ray that is started here: nothing of a job passes through it."""


class OwnRay:
    """Starts a Ray with a token of its own, and this process as its driver; `stop` ends it. Idempotent."""

    def __init__(self, prints: bool):
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        for name, value in LONG_COPIES.items():
            os.environ.setdefault(name, value)
        self._folder: str | None = tempfile.mkdtemp(prefix="bml-ray-")
        ours = signal.getsignal(signal.SIGTERM)
        try:
            with ray_auth.private():
                ray.init(
                    address="local",
                    namespace=NAMESPACE,
                    include_dashboard=False,
                    logging_level=logging.ERROR,
                    object_store_memory=OBJECT_STORE_NBYTES,
                    log_to_driver=prints,
                    _temp_dir=self._folder,
                )
        except BaseException:
            self.stop()
            raise
        # Ray has put its own handler there. Who had one, as the command line has, ends the job itself.
        if callable(ours) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, ours)

    def stop(self) -> None:
        """End it, and remove its folder."""
        if ray.is_initialized():
            ray.shutdown()
        ray_auth.forget()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
