"""What to send: forests, the algorithms that make them, their proof, their price, every server's part."""

from bml.schedule.bound import Bound, bound, bound_kind, prove
from bml.schedule.choice import AnyPrograms, OneProgram, Programs, Schedules
from bml.schedule.cost import Load, gst, gst_staged, load
from bml.schedule.direct import DirectProgram
from bml.schedule.exchange import Exchange, ExchangeProgram, verify_exchange
from bml.schedule.forest import Down, Forest
from bml.schedule.planner import ALGORITHMS, AnyProgram, Plan, plan
from bml.schedule.program import Hop, Phase, Program, Range, Relay, compile_program
from bml.schedule.verify import verify

__all__ = [
    "ALGORITHMS",
    "AnyProgram",
    "AnyPrograms",
    "Bound",
    "DirectProgram",
    "Down",
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
