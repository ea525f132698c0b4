"""
Multi-GPU matrix multiplication for Python programs that run under MPI.

``C := alpha op(A) op(B) + beta C`` with one process per GPU. Rank 0 computes a static schedule and broadcasts it. Every
rank fires its part: direct copies into its peers' memory, cuBLAS calls and flags. Importing this package loads neither
MPI nor CUDA; the first `Session` does.
"""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
import sys
from typing import TYPE_CHECKING, Any

from uncut_mpi.errors import (
    CapacityError,
    DataFileError,
    DeviceError,
    ParamError,
    PeerFailedError,
    PinError,
    PlanError,
    RankMismatchError,
    ScheduleError,
    StallError,
    TopologyError,
    UncutError,
)
from uncut_mpi.instead import no_attribute
from uncut_mpi.model.layout import Layout
from uncut_mpi.model.locations import Location
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.machine_files import load_machine, machine_names
from uncut_mpi.model.placement import Placement
from uncut_mpi.planning.options import Blocking, ScheduleOptions

if TYPE_CHECKING:
    from uncut_mpi import blas
    from uncut_mpi.api.batch import Batch
    from uncut_mpi.api.call import CallResult
    from uncut_mpi.api.flight import Handle
    from uncut_mpi.api.gemm_plan import GemmPlan, Trace
    from uncut_mpi.api.matrix import Matrix
    from uncut_mpi.api.plans import PlanSummary
    from uncut_mpi.api.session import Session, matmul

_HERE = pathlib.Path(__file__).resolve().parent

# Loaded at first use, since a session needs MPI and the packages above it do not.
_LAZY = {
    "Session": "uncut_mpi.api.session",
    "Batch": "uncut_mpi.api.batch",
    "Matrix": "uncut_mpi.api.matrix",
    "GemmPlan": "uncut_mpi.api.gemm_plan",
    "Handle": "uncut_mpi.api.flight",
    "CallResult": "uncut_mpi.api.call",
    "PlanSummary": "uncut_mpi.api.plans",
    "Trace": "uncut_mpi.api.gemm_plan",
    "matmul": "uncut_mpi.api.session",
}

__all__ = [
    "Batch",
    "Blocking",
    "blas",
    "CallResult",
    "CapacityError",
    "DataFileError",
    "DeviceError",
    "GemmPlan",
    "Handle",
    "Layout",
    "Location",
    "Machine",
    "Matrix",
    "ParamError",
    "PeerFailedError",
    "PinError",
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
    "matmul",
    "__version__",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name == "blas":
        return importlib.import_module("uncut_mpi.blas")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name == "_native":  # whoever imports it comes here first
        return _load_native()
    raise no_attribute(f"module {__name__!r}", name, __all__)


def _version() -> str:
    from importlib import metadata  # which takes as long to load as the rest of this package

    try:
        return metadata.version("uncut_mpi")
    except metadata.PackageNotFoundError:
        raise ImportError(
            f"uncut_mpi is not installed in this Python ({sys.executable}): run launch/setup in {_HERE.parent}, or "
            "'pip install -e .' there"
        ) from None


def _load_native() -> Any:
    try:
        return importlib.import_module("uncut_mpi._native")
    except ModuleNotFoundError as error:
        if error.name != "uncut_mpi._native":
            raise
    others = ", ".join(sorted(path.name for path in _HERE.glob("_native*.so")))
    raise ImportError(
        f"{_HERE} has no compiled part for Python {sys.version_info.major}.{sys.version_info.minor}"
        + (f", only {others}" if others else "")
        + ". It is a checkout's folder, which Python finds before the installed package: start Python in another "
        f"folder, or run 'pip install -e .' in {_HERE.parent} (launch/setup does)"
    )


if importlib.util.find_spec("uncut_mpi._native") is None:
    _version()  # a checkout that is not installed says so at once
