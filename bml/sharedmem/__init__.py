"""The collective of servers that share a host: an allreduce in shared memory, and zero-copy sends.

Each server writes its own memory, and the others read it. Segments are anonymous files of their owner, so
nothing has a name, and a segment is gone with the last process that has it mapped, however that process ends.

    segment, pool                       memory of one process that other processes of the host can read
    status_page, status_pages           where each server stands in a step, and where its data lies
    reduction                           the arithmetic of one step: contributions in, result out
    result_shares, joined_mapping       the shares of results, and their mapping as one array
    futex                               sleeping until a word of shared memory changes
    zero_copy, registration_page        payloads of the tcp transport that are read in the sender's memory
    proof                               the proof that a page belongs to a server of this job

Everything else, such as heartbeats and broken connections, goes over the links of the tcp transport. Failures
are detected there as in a job without shared memory.
"""

from bml.sharedmem.pool import SharedPool
from bml.sharedmem.reduction import Reduction, Use
from bml.sharedmem.status_page import StatusPageAddress
from bml.sharedmem.status_pages import StatusPages

__all__ = ["Reduction", "SharedPool", "StatusPageAddress", "StatusPages", "Use"]
