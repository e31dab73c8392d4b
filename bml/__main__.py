"""`python -m bml`, and the command `bml`. Ctrl-C while it imports ends it as one later does."""

import sys


def main() -> None:
    """Run the command; ends the process with its exit status."""
    try:
        from bml.cli import main as command
    except KeyboardInterrupt:
        print("Aborted!", file=sys.stderr)
        sys.exit(1)
    command(prog_name="bml")


if __name__ == "__main__":
    main()
