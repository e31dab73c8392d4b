"""The registry of algorithms: the file of an algorithm registers the function that builds its schedule.

    @algorithm("tree", does="binary tree of whole vectors", damaged="survivors renumbered")
    def tree(fabric: Fabric) -> Forest: ...

`bml.schedule.select.available` imports these files, one line for each. The names that `plan` and the commands
take, the tests that go through all algorithms and the table of docs/explanation/schedules.md are made from
this registry.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from bml.schedule.ir.exchange import Exchange
from bml.schedule.ir.forest import Forest
from bml.topology import Fabric, UsageError

Builder = TypeVar("Builder", bound=Callable[..., Forest | Exchange])
Read: TypeAlias = Callable[[str], Any]


@dataclass(frozen=True)
class Algorithm:
    """One way to make a schedule.

    Attributes:
        names: the name by which plans call it, then others that mean the same.
        builder: makes the schedule of a fabric; its second argument is what followed the colon, if any did.
        does: what it does, in Markdown, for the table of the documents.
        damaged: what it does on a damaged fabric, likewise.
        argument: what may follow the colon, as a regular expression; "" if nothing may.
        examples: names with arguments, such as `ps:4`; tests build each of them on at least nine servers.
        read: makes the builder's argument from that text.
    """

    names: tuple[str, ...]
    builder: Callable[..., Forest | Exchange]
    does: str
    damaged: str
    argument: str = ""
    examples: tuple[str, ...] = ()
    read: Read = str

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    def build(self, fabric: Fabric, argument: str = "") -> Forest | Exchange:
        """Make the schedule; `argument` is what followed the colon, "" if nothing did.

        Raises:
            FabricError: it cannot work on this fabric; the message says why.
            UsageError: the argument does not suit the fabric, or the schedule is too large to be built.
        """
        return self.builder(fabric, self.read(argument)) if argument else self.builder(fabric)


_REGISTERED: dict[str, Algorithm] = {}


def algorithm(
    *names: str, does: str, damaged: str, argument: str = "", examples: tuple[str, ...] = (), read: Read = str
) -> Callable[[Builder], Builder]:
    """Register the function that builds a schedule. The fields are those of `Algorithm`.

    Raises:
        ValueError: a name is taken, or an example cannot be read or is missing.
    """

    def register(builder: Builder) -> Builder:
        made = Algorithm(names, builder, does, damaged, argument, examples, read)
        for name in names:
            if name in _REGISTERED or name == "auto":
                raise ValueError(f"there are two algorithms with the name '{name}'")
        if bool(argument) != bool(examples):
            raise ValueError(f"'{names[0]}' needs an argument and examples of it, or neither")
        _REGISTERED.update(dict.fromkeys(names, made))
        for example in examples:
            if find(example)[0] is not made:
                raise ValueError(f"'{example}' is an example of another algorithm than {names[0]}")
        return builder

    return register


def registered() -> dict[str, Algorithm]:
    """Every name and its algorithm, in alphabetical order; an algorithm with two names is there twice."""
    return dict(sorted(_REGISTERED.items()))


def find(text: str) -> tuple[Algorithm, str]:
    """Read `mesh`, `ring:both` or `flextree:3x3`; return the algorithm and what follows the colon.

    Raises:
        UsageError: there is no such algorithm, or that cannot follow its name.
    """
    name, colon, argument = text.partition(":")
    if name not in _REGISTERED:
        raise UsageError(f"'{text}' is not an algorithm: choose one of auto, {', '.join(registered())}")
    found = _REGISTERED[name]
    if colon and not re.fullmatch(found.argument or "(?!)", argument):
        how = f"it like {name} or {found.examples[0]}" if found.argument else f"{name} alone"
        raise UsageError(f"'{argument}' cannot follow the colon in '{text}': write {how}")
    return found, argument
