"""The emulated fabrics on this machine, and the network namespaces that belong to them.

A namespace is ours if the alias or the group of its devices says so, whatever its name: other programs may
use the same names. In the folder of namespaces there may be a file without a namespace behind it, as
namespaces end with the machine, and the files of a container may stay. Such a file is ours if a saved state
names it.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

from bml.fabric import namespace, state
from bml.fabric.layout import DEFAULT_NAME, Layout, belongs
from bml.fabric.state import State
from bml.topology import parse
from bml.topology.errors import FabricError, UsageError


def known(name: str) -> State | None:
    """The state of the fabric with this name, None if there is none.

    `complete` is corrected if a restart or `ip netns del` has removed namespaces since it was saved.
    """
    found = state.load(name)
    if found is None or not found.complete:
        return found
    whole = all(namespace.is_alive(each) for each in _spaces(found, name))
    return replace(found, complete=whole and not found.orphaned)


def complete(name: str) -> State:
    """The state of the fabric with this name. Raises FabricError if none is up, or only a part of it."""
    found = known(name)
    if found is None:
        raise FabricError(f"no emulated fabric {name} is up: bml fabric up bcube:3x2{named(name)}")
    if not found.complete:
        raise FabricError(f"the emulated fabric {name} is not whole: bml fabric down{named(name)}, then up")
    return found


def ours(name: str) -> list[str]:
    """The namespaces of the fabric with this name, and files without a namespace; call under the lock."""
    return [each for each in _candidates(name) if _is_ours(each, name)]


def others(name: str) -> list[str]:
    """The namespaces with this fabric's names that other programs made; call under the lock."""
    return [each for each in _candidates(name) if not _is_ours(each, name)]


def refuse_others(name: str) -> None:
    """Raise FabricError, which names them, if other programs made namespaces with this fabric's names."""
    strangers = others(name)
    if strangers:
        raise FabricError(
            f"bml did not make the network namespaces {', '.join(strangers)}, and leaves them as they are: "
            f"use another --name than {name} for an emulated fabric, or remove them with ip netns del"
        )


def refuse_a_jobs(name: str, found: State) -> None:
    """Raise FabricError if this fabric was made for one job, which still runs."""
    if found.alone and not found.orphaned:
        raise FabricError(
            f"the emulated fabric {name} was made for a job (process {found.maker}) and goes with it: use "
            "another --name; a job without --fabric-name gets a fabric of its own"
        )


def orphans() -> list[str]:
    """The names of the fabrics whose makers have ended without taking them down."""
    names = sorted(path.stem for path in state.FOLDER.glob("*.json"))
    return [name for name in names if (found := state.load(name)) is not None and found.orphaned]


def named(name: str) -> str:
    """The option that selects this fabric in a command; empty for the default name."""
    return "" if name == DEFAULT_NAME else f" --name {name}"


def netlink() -> ModuleType:
    """The module `bml.fabric.netlink`. Raises FabricError if pyroute2 is missing, which only changes need."""
    from bml.fabric import netlink

    return netlink


def _candidates(name: str) -> list[str]:
    return [each for each in namespace.names() if belongs(each, name)]


def _is_ours(space: str, name: str) -> bool:
    if namespace.is_alive(space):
        return bool(netlink().is_ours(space, name))
    found = state.load(name)
    return found is not None and space in (_spaces(found, name) or [space])


def _spaces(found: State, name: str) -> list[str]:
    """Every namespace of a saved state; none if the state could not be read."""
    try:
        layout = Layout(parse(found.fabric), name)
    except UsageError:
        return []
    return [layout.namespace(node) for node in layout.nodes]
