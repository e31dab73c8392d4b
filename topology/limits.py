"""The largest sizes of fabrics."""

MAX_SERVERS = 65536
"""Beyond this nothing here has been tried; it also keeps a slip of the pen from eating the memory."""
