"""What all tests need of the process that they run in."""

from __future__ import annotations

import signal

# A shell without job control starts what it puts into the background with SIGINT ignored, and whatever that
# starts inherits it: commands under test could not be interrupted.
signal.signal(signal.SIGINT, signal.default_int_handler)
