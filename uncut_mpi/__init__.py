"""
Multi-GPU matrix multiplication for Python programs that run under MPI.

``C := alpha op(A) op(B) + beta C`` with one process per GPU: rank 0 computes a static schedule and
broadcasts it; every rank fires its part as direct copies into its peers' memory, cuBLAS calls and
flags. Importing this package loads neither MPI nor CUDA; the first `Session` does.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

from uncut_mpi.errors import (
    CapacityError,
    DataFileError,
    DeviceError,
    ParamError,
    PeerFailedError,
    PlanError,
    RankMismatchError,
    ScheduleError,
    StallError,
    TopologyError,
    UncutError,
)
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.machine_files import load_machine, machine_names
from uncut_mpi.model.placement import Location, Placement
from uncut_mpi.planning.options import Blocking, ScheduleOptions

if TYPE_CHECKING:
    from uncut_mpi.api.entries import CallResult, PlanSummary
    from uncut_mpi.api.gemm_plan import GemmPlan
    from uncut_mpi.api.matrix import Matrix
    from uncut_mpi.api.session import Session
    from uncut_mpi.api.trace import Trace

__version__ = importlib.metadata.version("uncut_mpi")

# Loaded at first use, since a session needs MPI and the packages above it do not.
_LAZY = {
    "Session": "uncut_mpi.api.session",
    "Matrix": "uncut_mpi.api.matrix",
    "GemmPlan": "uncut_mpi.api.gemm_plan",
    "CallResult": "uncut_mpi.api.entries",
    "PlanSummary": "uncut_mpi.api.entries",
    "Trace": "uncut_mpi.api.trace",
}

__all__ = [
    "Blocking",
    "CallResult",
    "CapacityError",
    "DataFileError",
    "DeviceError",
    "GemmPlan",
    "Location",
    "Machine",
    "Matrix",
    "ParamError",
    "PeerFailedError",
    "Placement",
    "PlanError",
    "PlanSummary",
    "RankMismatchError",
    "ScheduleError",
    "ScheduleOptions",
    "Session",
    "StallError",
    "TopologyError",
    "Trace",
    "UncutError",
    "load_machine",
    "machine_names",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
