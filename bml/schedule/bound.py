"""A proved lower bound on the synchronisation time: no plan can beat what its cuts must carry."""

from __future__ import annotations

from fractions import Fraction

from topology import Fabric, FabricError


def bound(fabric: Fabric) -> Fraction:
    """Cut bound on the pipelined GST of any forest, in units of T = P/B.

    Take m > 1 live servers. A NIC is usable if another live server is attached to its live switch. Every
    server but the owner sends its partial of a piece, and every server but the owner is sent the result,
    so 2(m-1) times P is sent in all, at least: no faster than 2(m-1) / (usable NICs). And one server alone
    sends at least P: its partial of what others own, the result of what it owns itself; the same holds
    for receiving: no faster than 1 / (its usable NICs). The larger of the two is returned.

    Raises:
        FabricError: some live server has no usable NIC while others live, so no plan exists.
    """
    if len(fabric.servers) <= 1:
        return Fraction(0)
    usable = {server: _usable(fabric, server) for server in fabric.servers}
    for server, nics in usable.items():
        if nics == 0:
            raise FabricError(f"server {server} of {fabric} is cut off: heal one of its links or remove it")
    everywhere = Fraction(2 * (len(usable) - 1), sum(usable.values()))
    return max(everywhere, Fraction(1, min(usable.values())))


def _usable(fabric: Fabric, server: int) -> int:
    return sum(1 for level in range(fabric.levels) if fabric.neighbours(server, level))
