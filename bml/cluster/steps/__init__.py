"""The two data planes of a server: steps over its links, and steps in memory that a host's servers share.

`runner.StepRunner` is their interface. The rest of the server does not know which of them it has.
"""
