"""The changelog has versions, each with its groups; what it says of a released version stays as it is."""

from __future__ import annotations

import hashlib
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "CHANGELOG.md").read_text()
VERSIONS = dict(re.findall(r"^## (\d+\.\d+\.\d+)[^\n]*\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL))
RELEASED = {"0.1.0": "baad2a25ec2bce13eae325857407c5b67376abc6f7f2d39cf208534553051828"}
"""Version -> sha256 of what the changelog says of it. A new line belongs to the version above."""


@pytest.mark.parametrize("version", RELEASED)
def test_what_is_said_of_a_released_version_stays(version: str) -> None:
    assert hashlib.sha256(VERSIONS[version].encode()).hexdigest() == RELEASED[version]


def test_every_line_is_in_a_group_of_one_version() -> None:
    head = TEXT[: TEXT.index("\n## ")]
    assert not re.search(r"^- ", head, re.MULTILINE)
    for version, said in VERSIONS.items():
        groups = re.findall(r"^### (.*)$", said, re.MULTILINE)
        assert groups == ["Added", "Changed", "Fixed"], version
        assert not re.search(r"^- ", said[: said.index("###")], re.MULTILINE)
    lines = re.findall(r"^- .*$", TEXT, re.MULTILINE)
    assert len(lines) == len(set(lines)), "a line is there twice"


def test_the_newest_version_is_that_of_the_package_or_follows_it() -> None:
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert package in list(VERSIONS)[:2]
