"""A store in a folder, with the methods of those of torch.distributed."""

import fcntl
import os
import time
from datetime import timedelta
from pathlib import Path
from urllib.parse import quote

_LOOK_S = 0.01


class FileStore:
    """Each key is a file in `folder`."""

    def __init__(self, folder: Path):
        self._folder = Path(folder)

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else value
        path = self._path(key)
        new = path.with_name(f"{path.name}.{os.getpid()}.new")
        new.write_bytes(data)
        new.rename(path)

    def get(self, key: str) -> bytes:
        self.wait([key], timedelta(seconds=60))
        return self._path(key).read_bytes()

    def add(self, key: str, amount: int) -> int:
        with open(self._folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            path = self._path(key)
            value = (int(path.read_bytes()) if path.exists() else 0) + amount
            self.set(key, str(value))
        return value

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        until_s = time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if time.monotonic() > until_s:
                raise RuntimeError(f"no values for {keys} within {timeout}")
            time.sleep(_LOOK_S)

    def check(self, keys: list[str]) -> bool:
        return all(self._path(key).exists() for key in keys)

    def clone(self) -> "FileStore":
        return FileStore(self._folder)

    def _path(self, key: str) -> Path:
        return self._folder / quote(key, safe="")
