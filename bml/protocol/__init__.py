"""The pure protocol: per-server engine and membership, and the coordinator that decides views.

Everything here is a state machine, `handle(event, now) -> instructions`: no socket, no clock, no
thread. The simulator (`bml.sim`), the tests and the real server run the same objects.
"""
