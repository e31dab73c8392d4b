"""`python -m bml`, the same as the command `bml`."""

from bml.cli import main

if __name__ == "__main__":
    main(prog_name="bml")
