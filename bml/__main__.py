"""`python -m bml`, and the command `bml`. Ctrl-C while it imports ends it as one later does."""

import sys
from signal import SIGHUP, SIGINT, SIGTERM, pthread_kill, signal
from threading import Timer, get_ident
from typing import Any, NoReturn

_AGAIN_S = 0.01  # soon enough for a user who waits


def main() -> None:
    """Run the command; ends the process with its exit status."""
    sys.unraisablehook = _dropped
    try:
        from bml.cli import main as command
    except KeyboardInterrupt:
        _aborted()
    except Exception as error:  # Python 3.11 wraps what comes in __set_name__
        if not isinstance(error.__cause__, KeyboardInterrupt):
            raise
        _aborted()
    command(prog_name="bml")


def _aborted() -> NoReturn:
    print("Aborted!", file=sys.stderr)
    sys.exit(1)


def _dropped(what: Any) -> None:
    """Let a signal come again whose exception Python drops, since it came while an object was finalized."""
    if issubclass(what.exc_type, KeyboardInterrupt):
        number = SIGINT
    elif what.exc_type is SystemExit and what.exc_value.code in (128 + SIGTERM, 128 + SIGHUP):
        from bml.cli import terminated

        number = what.exc_value.code - 128
        signal(number, terminated)
    else:
        sys.__unraisablehook__(what)
        return
    again = Timer(_AGAIN_S, pthread_kill, (get_ident(), number))  # handled in the main thread alone
    again.daemon = True
    again.start()


if __name__ == "__main__":
    main()
