"""The toy training of the tests with real processes, and the benchmarks of which tests are small samples."""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "cluster"), str(TESTS.parent / "benchmarks")]
