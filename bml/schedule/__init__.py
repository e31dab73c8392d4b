"""Schedules: forests, the algorithms that make them, their proof, their price, every server's part."""

from bml.schedule.algorithms.direct import DirectProgram
from bml.schedule.bounds.bound import Bound, bound, bound_kind, prove
from bml.schedule.ir.cost import Load, gst, gst_staged, load
from bml.schedule.ir.exchange import Exchange, ExchangeProgram, verify_exchange
from bml.schedule.ir.forest import BroadcastTrees, Forest
from bml.schedule.ir.program import Hop, Phase, Program, Range, Relay, compile_program
from bml.schedule.ir.verify import verify
from bml.schedule.select.available import ALGORITHMS
from bml.schedule.select.choice import AnyPrograms, OneProgram, Programs, Schedules
from bml.schedule.select.plan import AnyProgram, Plan
from bml.schedule.select.planner import plan

__all__ = [
    "ALGORITHMS",
    "AnyProgram",
    "AnyPrograms",
    "Bound",
    "BroadcastTrees",
    "DirectProgram",
    "Exchange",
    "ExchangeProgram",
    "Forest",
    "Hop",
    "Load",
    "OneProgram",
    "Phase",
    "Plan",
    "Program",
    "Programs",
    "Range",
    "Relay",
    "Schedules",
    "bound",
    "bound_kind",
    "compile_program",
    "gst",
    "gst_staged",
    "load",
    "plan",
    "prove",
    "verify",
    "verify_exchange",
]
