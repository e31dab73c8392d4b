"""Faults: plans that break parts, the detector that notices, the diagnosis that names it, detours."""

from bml.faults.detector import Detector, Suspicion
from bml.faults.detour import Path, shortest_paths
from bml.faults.diagnosis import Diagnosis, Evidence, Settlement, diagnose, settle
from bml.faults.notation import AtOnce, AtPhase, AtStep, AtTime, Fault
from bml.faults.plan import FaultPlan, Firing, Moment, due
from bml.faults.repartition import owners, stand_in

__all__ = [
    "AtOnce",
    "AtPhase",
    "AtStep",
    "AtTime",
    "Detector",
    "Diagnosis",
    "Evidence",
    "Fault",
    "FaultPlan",
    "Firing",
    "Moment",
    "Path",
    "Settlement",
    "Suspicion",
    "diagnose",
    "due",
    "owners",
    "settle",
    "shortest_paths",
    "stand_in",
]
