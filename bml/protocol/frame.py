from bml.transport.frame import *  # noqa: F403
from bml.transport.frame import FrameError, Header, Kind  # noqa: F401
