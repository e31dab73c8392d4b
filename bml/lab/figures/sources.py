"""The papers whose figures are computed, as they are cited."""

from __future__ import annotations

BML = (
    'Wang, Li, Cheng, Geng, Wang, Wang, Xia, Wu: "BML: A High-performance, Low-cost Gradient Synchronization '
    'Algorithm for DML Training", NeurIPS 2018'
)
FAULT_TOLERANT = (
    'Wang, Li, Cheng, Geng, Wang, Wang, Xia, Wu: "A Scalable, High-Performance, and Fault-Tolerant Network '
    'Architecture for Distributed Machine Learning", IEEE/ACM Transactions on Networking 28, 2020'
)
HIPS = (
    'Geng, Li, Cheng, Wang, Li: "HiPS: Hierarchical Parameter Synchronization in Large-Scale Distributed '
    'Machine Learning", NetAI 2018'
)
HIPS_OR_LATER = f"{HIPS}, or {FAULT_TOLERANT} (we have the values without their page)"
"""Values of which we do not know which paper has them."""
GENMODEL = (
    'Xiong, Chen, Jiang, Li, Wang, Wang: "Revisiting the Time Cost Model of AllReduce", '
    "2024, arXiv:2409.04202"
)
