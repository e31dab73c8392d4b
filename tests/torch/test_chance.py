"""Random numbers that are kept by two threads at once, while garbage is collected."""

from __future__ import annotations

import subprocess
import sys

import pytest

KEEPING = '''
import gc
import threading
import time

import torch

from bml.torch.devices.chance import forked, seed_host


class Garbage:
    """A cycle: when it is collected, another thread runs, and the next one is left."""

    def __init__(self):
        self.itself = self

    def __del__(self):
        time.sleep(0)
        if not over:
            Garbage()


def keep():
    for _ in range(300):
        with forked(torch.device("cpu")):
            seed_host(3)


over = False
gc.set_threshold(3)
Garbage()
threads = [threading.Thread(target=keep) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
over = True
'''


@pytest.mark.slow
def test_two_threads_keep_random_numbers_while_garbage_is_collected() -> None:
    """On a lock of PyTorch's own both waited for ever, which no time-out ends: hence a process of its own."""
    subprocess.run([sys.executable, "-c", KEEPING], check=True, timeout=60)
