"""How the reports of servers that left on notice, or did not get in, name it."""

LEFT = "Left"
"""A user or a machine had asked the server to leave."""
DRAINED = "Drained"
"""Ray drains the node on which it was, or has lost it: the server may come again on another."""
NOT_JOINED = ("JoinFailed", "NotJoined")
"""A server that was started did not get into the job."""
NOTICED = (LEFT, DRAINED)
"""Of a server with one of these nothing was lost."""
