"""The root of all errors, and one class for each party that can act on them.

The root lives in the leftmost package because imports only point left; users write `bml.BmlError`.
None derives from ValueError or another class of Python's: training code catches those round its samples.
"""


class BmlError(Exception):
    """The root of every error that this project raises on purpose."""


class UsageError(BmlError):
    """The caller asked for something that cannot be: bad text, bad array, unknown name."""


class FabricError(BmlError):
    """The environment is at fault: what is left of the fabric, or a peer, cannot do what is needed."""


class InvariantError(BmlError):
    """This project is at fault: a promise of the runtime was about to be broken. Please report it."""
