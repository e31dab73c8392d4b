"""Memory that the servers of one host share: each writes its own, the others read it.

Nothing has a name: segments are anonymous files of their owner (`segment`), gone with the last process that
has one mapped, however it ends. A `StatusPage` says where a server stands and where its data lies;
`StatusPages` are all servers' as one of them sees them; a `Reduction` is the arithmetic of one step. All
else, heartbeats and broken connections above all, goes over the links of the tcp transport, whose failures
stay what they are.
"""

from bml.sharedmem.pool import SharedPool
from bml.sharedmem.reduction import Reduction, Use
from bml.sharedmem.status_page import StatusPageAddress
from bml.sharedmem.status_pages import StatusPages

__all__ = ["Reduction", "SharedPool", "StatusPageAddress", "StatusPages", "Use"]
