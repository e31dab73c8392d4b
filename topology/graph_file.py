"""Graphs of servers and switches from files: a list of edges, JSON, or GraphML.

Nodes that are whole numbers are servers, any other name is a switch. An edge of two servers is a cable, one
of a server and a switch a NIC. `capacity` is the rate of the NIC, or of both NICs of a cable, in units of B.

    # a list of edges: two nodes and perhaps a rate on each line
    0 rack-a
    1 rack-a
    0 1 2/5

    {"edges": [["0", "rack-a"], ["1", "rack-a"], [0, 1, "2/5"]]}          or networkx's node-link data
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree.ElementTree import ParseError, fromstring

from bml.topology.errors import UsageError
from bml.topology.fabric import Fabric
from bml.topology.graph import Ends, graph, is_notation, of_switches

_MOST_NBYTES = 16_000_000
_MOST_DIGITS = 6


class _Edge(NamedTuple):
    ends: tuple[str, str]
    rate: str


def graph_of(text: str) -> Fabric:
    """Build a graph from its notation, or from the file of this name, as `graph:` has it.

    Raises:
        UsageError: the file cannot be read, or has no graph that can be built; the message says why.
    """
    if is_notation(text):
        return graph(text)
    path = Path(text)
    try:
        if not path.is_file() and path.exists():
            raise UsageError(f"graph {path} is no file: give a list of edges, JSON or GraphML")
        if path.stat().st_size > _MOST_NBYTES:
            raise UsageError(f"graph {path} is too large: {_MOST_NBYTES // 10**6} MB are the most")
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"graph {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"graph {text!r} cannot be read: {error}") from None
    try:
        return of_switches(_switches(_edges(path, data)))
    except UsageError as error:
        raise UsageError(f"graph {path}: {error}") from None


def _edges(path: Path, data: bytes) -> list[_Edge]:
    kind = path.suffix.lower()
    if kind in (".graphml", ".xml"):  # says itself how its characters are encoded
        return list(_of_graphml(data))
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError("it is no text: give a list of edges, JSON or GraphML, in UTF-8") from None
    return list(_of_json(text) if kind == ".json" else _of_lines(text))


def _of_lines(data: str) -> Iterator[_Edge]:
    for number, line in enumerate(data.splitlines(), 1):
        words = line.partition("#")[0].replace(",", " ").split()
        if not words:
            continue
        if len(words) not in (2, 3):
            raise UsageError(
                f"line {number}, '{line.strip():.60}': write two nodes and perhaps a rate such as 2, 0.4 "
                "or 2/5"
            )
        yield _Edge((words[0], words[1]), words[2] if len(words) == 3 else "")


def _of_json(data: str) -> Iterator[_Edge]:
    """A directed graph has each cable twice, once for each way: see _both_ways."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"it is no JSON: {error}") from None
    edges = content.get("edges", content.get("links")) if isinstance(content, dict) else None
    if not isinstance(edges, list):
        raise UsageError('JSON has a list "edges" of [node, node] or [node, node, rate]')
    read = [_edge_of_json(each) for each in edges]
    nodes = content.get("nodes", [])
    if not isinstance(nodes, list):
        raise UsageError('"nodes" of JSON is a list')
    _check_nodes((each.get("id") if isinstance(each, dict) else each for each in nodes), read)
    yield from _both_ways(read) if content.get("directed") is True else read


def _edge_of_json(edge: Any) -> _Edge:
    match edge:
        case [a, b]:
            return _edge(a, b, "")
        case [a, b, rate]:
            return _edge(a, b, rate)
        case {"source": a, "target": b}:
            return _edge(a, b, edge.get("capacity", ""))
    raise UsageError(f"{json.dumps(edge):.60} is no edge: write [node, node, rate]")


def _of_graphml(data: bytes) -> Iterator[_Edge]:
    import networkx as nx  # here, as it takes half a second

    try:
        n_graphs = sum(each.tag.rpartition("}")[2] == "graph" for each in fromstring(data).iter())
        read = nx.parse_graphml(data, force_multigraph=True)
    except (nx.NetworkXError, ParseError, ValueError, KeyError) as error:
        raise UsageError(f"it is no GraphML: {error}") from None
    if n_graphs > 1:
        raise UsageError(f"it has {n_graphs} graphs: give one")
    edges = [_edge(a, b, attributes.get("capacity", "")) for a, b, attributes in read.edges(data=True)]
    _check_nodes(read.nodes, edges)
    yield from _both_ways(edges) if read.is_directed() else edges


def _check_nodes(nodes: Iterable[Any], edges: Iterable[_Edge]) -> None:
    """Raise UsageError for a node without an edge: it would be missing in silence."""
    joined = {end for each in edges for end in each.ends}
    for node in nodes:
        if str(node).strip() not in joined:
            raise UsageError(f"node {node!s:.60} has no edge: the graph falls apart")


def _both_ways(edges: Iterable[_Edge]) -> Iterator[_Edge]:
    """Leave out an edge whose opposite has come: together they are one cable, which has one rate."""
    unmatched: dict[tuple[str, str], list[_Edge]] = {}
    found: list[_Edge] = []
    for edge in edges:
        opposites = unmatched.get((edge.ends[1], edge.ends[0]), [])
        equal = [each for each in opposites if _value(each.rate) == _value(edge.rate)]
        if equal:
            opposites.remove(equal[0])
        else:
            unmatched.setdefault(edge.ends, []).append(edge)
            found.append(edge)
    for (one, other), there in unmatched.items():
        if there and (back := unmatched.get((other, one))):
            raise UsageError(
                f"the cable from {one} to {other} has the rate {there[0].rate or 1} and back "
                f"{back[0].rate or 1}: give both ways one"
            )
    yield from found


def _value(rate: str) -> Fraction | str:
    """The number that a rate is, 1 if there is none; the text if it is no number, which is refused later."""
    try:
        return Fraction(rate or 1)
    except (ValueError, ZeroDivisionError):
        return rate


def _edge(a: Any, b: Any, rate: Any) -> _Edge:
    for node in (a, b):
        if isinstance(node, bool) or not isinstance(node, str | int):
            raise UsageError(f"{node!r:.60} is no node: write a whole number or a name")
    if isinstance(rate, bool) or not isinstance(rate, str | int | float):
        raise UsageError(f"{rate!r:.60} is no rate: write a positive number")
    return _Edge((str(a).strip(), str(b).strip()), str(rate).strip())


def _switches(edges: Iterable[_Edge]) -> list[Ends]:
    """The switches and cables, in the order in which they come."""
    switches: dict[object, list[tuple[int, str]]] = {}
    for number, (ends, rate) in enumerate(edges):
        servers = [_server(node) for node in ends]
        match servers:
            case [None, None]:
                raise UsageError(
                    f"switches {ends[0]} and {ends[1]} are joined: a network of switches counts as one, so "
                    "give them one name; if these are servers, number them 0, 1, 2, ..."
                )
            case [None, int(server)]:
                switches.setdefault(ends[0], []).append((server, rate))
            case [int(server), None]:
                switches.setdefault(ends[1], []).append((server, rate))
            case [int(one), int(other)]:
                if one == other:
                    raise UsageError(f"a cable joins server {one} with itself")
                switches[number] = [(one, rate), (other, rate)]
    for name, found in switches.items():
        if len(found) < 2:
            raise UsageError(f"switch {name} joins server {found[0][0]} alone: it needs two servers at least")
    return list(switches.values())


def _server(node: str) -> int | None:
    """The number of a server, None for a switch."""
    if not (node.isascii() and node.isdecimal()):
        return None
    if len(node) > _MOST_DIGITS:
        raise UsageError(
            f"node {node:.60} is a whole number, and so a server: they are numbered 0, 1, 2, ...; begin the "
            "name of a switch with a letter"
        )
    return int(node)
