"""RDMA: payloads move by one-sided writes from registered memory into registered memory.

`VerbsTransport` is `bml.transport.interface.Transport`. Everything that depends on pyverbs is in `driver`,
which is imported when a NIC is opened and not before, so this package can be imported anywhere.
"""

from bml.transport.verbs.settings import VerbsSettings
from bml.transport.verbs.transport import VerbsTransport

__all__ = ["VerbsSettings", "VerbsTransport"]
