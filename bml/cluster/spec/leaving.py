"""How the reports of servers that left on notice name it."""

LEFT = "Left"
"""A user or a machine had asked the server to leave."""
DRAINED = "Drained"
"""Ray drains the node on which it was, or has lost it: the server may come again on another."""
NOTICED = (LEFT, DRAINED)
"""Of a server with one of these nothing was lost."""
