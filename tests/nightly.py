"""Runs what has no place in the gate, and keeps what it came to: `make nightly PARTS="check soak"`, or all.

Every part is one command. What it came to goes into the table of docs/explanation/verification.md: one row a
part, with the commit, the seed and the time it took. The exit status is 1 if a part failed or could not run.
"""

from __future__ import annotations

import datetime
import os
import re
import secrets
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "explanation" / "verification.md"
CANNOT = 77  #: exit status of a part that this machine cannot run

PARTS = {
    "check": "{bin}/bml check --seeds {seed}:{end}",
    "programs": "{bin}/bml check --programs --seeds {seed}:{end}",
    "all": "make --keep-going test gate",
    "matrix": "make test-matrix",
    "soak": "make soak SECONDS=600 SEED={seed}",
    "rdma": "tests/rdma/run.sh",
    "rdma-ray": "BML_RDMA_VM_MEM=6G tests/rdma/run.sh --ray",
    "torch": "make test-torch",
    "torch-newest": "make test-torch-newest",
    "mutants": "{bin}/python benchmarks/mutants.py build/mutants-{seed}.jsonl --seed {seed} --count 100",
}
HEAD = "| part | command | when | commit | seed | took | came to |\n" + "| --- " * 7 + "|\n"


def main(names: list[str]) -> int:
    unknown = sorted(set(names) - set(PARTS))
    if unknown:
        print(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    seed = int(os.environ.get("BML_FAULT_SEED") or secrets.randbelow(1 << 24))
    ends = [run(name, seed) for name in names or PARTS]
    return int(any(ends))


def run(name: str, seed: int) -> int:
    command = command_of(name, seed)
    print(f"== {name}: {command}", flush=True)
    began_s = time.monotonic()
    settings = {
        **os.environ,
        "BML_FAULT_SEED": str(seed),
        "BML_TESTS": "all",
    }  # `make test gate` samples else
    end = subprocess.run(["bash", "-c", command], cwd=ROOT, env=settings, check=False).returncode
    took_min = (time.monotonic() - began_s) / 60
    came_to = {0: "passed", CANNOT: "not run: this machine cannot"}.get(end, f"**failed** ({end})")
    when = datetime.datetime.now(datetime.UTC).date()
    row = f"| {name} | `{command}` | {when} | {commit()} | {seed} | {took_min:.0f} min | {came_to} |"
    PAGE.write_text(with_row(PAGE.read_text(), name, row))
    return end


def command_of(name: str, seed: int) -> str:
    return PARTS[name].format(bin=".venv/bin", seed=seed, end=seed + 20_000)


def with_row(page: str, name: str, row: str) -> str:
    """The page with this row for the part, in place of its older one; rows stand in the order of PARTS."""
    before, head, after = page.partition(HEAD)
    if not head:
        raise ValueError(f"{PAGE} has no table that begins with {HEAD!r}")
    table, *rest = re.split(r"(?m)^(?!\|)", after, maxsplit=1)
    rows = {line.split("|")[1].strip(): line for line in table.splitlines()}
    rows[name] = row
    kept = [rows[part] for part in PARTS if part in rows]
    return before + head + "".join(f"{line}\n" for line in kept) + "".join(rest)


def commit() -> str:
    said = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return said.stdout.strip() or "none"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
