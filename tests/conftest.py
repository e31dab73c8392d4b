"""Settings of the process in which tests run."""

from __future__ import annotations

import signal

# A shell without job control starts background commands with SIGINT ignored. Their children inherit that, and
# commands under test could not be interrupted.
signal.signal(signal.SIGINT, signal.default_int_handler)
