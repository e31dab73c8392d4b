"""What emulated fabrics there are on this machine, and which network namespaces are theirs.

A namespace is ours if its devices say so, whatever its name: others may use our names for their own. A file
in the folder of namespaces without a namespace behind it (those end with the machine, the files of a
container may stay) is ours if a saved state speaks of it.
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
    """What is up: the file's word, unless a restart or somebody's `ip netns del` made it wrong."""
    found = state.load(name)
    if found is None or not found.complete:
        return found
    whole = all(namespace.is_alive(each) for each in _spaces(found, name))
    return replace(found, complete=whole and not found.orphaned)


def complete(name: str) -> State:
    """What is up under this name. Raises FabricError if that is nothing, or a part."""
    found = known(name)
    if found is None:
        raise FabricError(f"no emulated fabric {name} is up: bml fabric up bcube:3x2{named(name)}")
    if not found.complete:
        raise FabricError(f"the emulated fabric {name} is not whole: bml fabric down{named(name)}, then up")
    return found


def ours(name: str) -> list[str]:
    """The namespaces, and files without one, of the fabric of this name; under the lock."""
    return [each for each in _candidates(name) if _is_ours(each, name)]


def others(name: str) -> list[str]:
    """The namespaces that have this fabric's names, but were made by others; under the lock."""
    return [each for each in _candidates(name) if not _is_ours(each, name)]


def refuse_others(name: str) -> None:
    """Raise FabricError, which names them, if others have made namespaces with this fabric's names."""
    strangers = others(name)
    if strangers:
        raise FabricError(
            f"bml did not make the network namespaces {', '.join(strangers)}, and leaves them as they are: "
            f"use another --name than {name} for an emulated fabric, or remove them with ip netns del"
        )


def refuse_a_jobs(name: str, found: State) -> None:
    """Raise FabricError if this fabric was made for a job that runs."""
    if found.alone and not found.orphaned:
        raise FabricError(
            f"the emulated fabric {name} was made for a job (process {found.maker}) and goes with it: use "
            "another --name; a job without --fabric-name gets a fabric of its own"
        )


def orphans() -> list[str]:
    """Names of the fabrics whose makers have ended without taking them down."""
    names = sorted(path.stem for path in state.FOLDER.glob("*.json"))
    return [name for name in names if (found := state.load(name)) is not None and found.orphaned]


def named(name: str) -> str:
    """The option that a command needs to mean this fabric."""
    return "" if name == DEFAULT_NAME else f" --name {name}"


def netlink() -> ModuleType:
    """Raises FabricError if pyroute2 is missing; what only looks does not need it."""
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
    """Every namespace that a state speaks of; none if it could not be read."""
    try:
        layout = Layout(parse(found.fabric), name)
    except UsageError:
        return []
    return [layout.namespace(node) for node in layout.nodes]
