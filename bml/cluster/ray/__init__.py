"""The launcher for Ray: a server is an actor, and so is the coordinator."""
