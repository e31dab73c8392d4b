"""The code blocks of a Markdown page, and what a page says of how they are run.

A block is fenced with three backticks and a language:

- `python` runs as a program; if its first line is a comment with a file's name (`# train.py`), it is that
  file, and is run by what the page says later. `yaml`, `ini` and `text` are files in the same way.
- `console`: lines that begin with `$ ` are commands, the others are what they print. `…` stands for anything.
- `sh`: commands only.
- `json`, and `text` that is no file, are shown, not run.

A comment before a block, `<!-- block: … -->`, is not seen by readers and says one of:

- `not run: REASON`, for what this machine cannot do (commands of bml are still parsed);
- `needs root` or `needs torch`: run where that is;
- `ends with 1`: the exit status of its last command;
- `after`, and lines of Python that are run before it;
- `given train.py`, and the lines of that file: what a page says of a script, or of JSON, of the reader's;
- `in a session`, and such lines: the block is the body of a training function on four servers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

RUN = {"python", "console", "sh"}
SHOWN = {"text", "json", "yaml", "ini"}
CONDITIONS = {"needs root", "needs torch"}

_FENCE = re.compile(
    r"(?:<!--\s*block:\s*(?P<marker>.*?)-->\s*\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
_FILE = re.compile(r"# (?P<name>[\w.-]+\.(?:py|yaml|ini|txt))\n")
_MEASURED = re.compile(r"\\?\b\d+(\\\.\d+)? (ms|s)\b")
_DIGEST = re.compile(r"\b[0-9a-f]{12,}\b")


@dataclass(frozen=True)
class Block:
    """One fenced block: `line` is where its text begins, `marker` what the comment before it says."""

    page: str
    line: int
    language: str
    text: str
    marker: str
    set_up: str

    @property
    def place(self) -> str:
        """`page:line`, as editors open it."""
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str:
        """The name of the file that it is; empty if it is none."""
        found = _FILE.match(self.text)
        return found["name"] if found else ""

    @property
    def reason(self) -> str:
        """Why it is not run, empty if it is."""
        return self.marker.removeprefix("not run:").strip() if self.marker.startswith("not run:") else ""

    @property
    def is_sound(self) -> bool:
        """Whether language and marker are among those above."""
        marker = self.marker in {"", "after", "in a session", *CONDITIONS}
        known = marker or bool(self.reason or self.given) or re.fullmatch(r"ends with \d+", self.marker)
        return bool(known) and self.language in RUN | SHOWN

    @property
    def given(self) -> str:
        """The name of the file that its reader is thought to have; empty if there is none."""
        found = re.fullmatch(r"given ([\w-]+\.(?:py|json))", self.marker)
        return found[1] if found else ""

    @property
    def commands(self) -> list[tuple[str, str]]:
        """Commands of a `console` or `sh` block, each with what it prints; a backslash continues a line."""
        if self.language not in ("console", "sh"):
            return []
        text = self.text.replace("\\\n", " ")
        if self.language == "sh":
            return [(line, "") for line in text.splitlines() if line.strip() and not line.startswith("#")]
        first, *parts = re.split(r"^\$ ", text, flags=re.MULTILINE)
        assert not first.strip(), f"{self.place}: the first line of a console block is no command"
        return [(command, printed) for command, _, printed in (part.partition("\n") for part in parts)]


def blocks_of(page: str, text: str) -> list[Block]:
    """All fenced blocks of a page, in order."""
    found = []
    for match in _FENCE.finditer(text):
        first, _, set_up = (match["marker"] or "").strip().partition("\n")
        line = text.count("\n", 0, match.start("text")) + 1
        found.append(Block(page, line, match["language"], match["text"], first.strip(), set_up))
    return found


def read(path: Path, root: Path) -> list[Block]:
    """The blocks of a file, named relative to the root."""
    return blocks_of(str(path.relative_to(root)), path.read_text())


def missing(promised: str, printed: str) -> str:
    """The first promised line that was not printed after those before it; empty if there is none.

    Spaces count as one. `…` stands for anything, a measured time for any other, a digest for any other.
    """
    lines = iter([" ".join(line.split()) for line in printed.splitlines()])
    for line in promised.splitlines():
        wanted = " ".join(line.split())
        if wanted.strip("… ") and not any(re.fullmatch(_pattern(wanted), each) for each in lines):
            return line
    return ""


def _pattern(line: str) -> str:
    text = re.escape(line).replace("…", ".*").replace(r"\ ", " ")
    return _DIGEST.sub("[0-9a-f]+", _MEASURED.sub(r"[\\d.]+ \2", text))
