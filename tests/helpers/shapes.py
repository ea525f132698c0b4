"""Machines whose products have other shapes."""

from __future__ import annotations

import dataclasses

from uncut_mpi.model.costs import GemmShape
from uncut_mpi.model.dtypes import MEASURED
from uncut_mpi.model.machine import Machine


def with_shapes(machine: Machine, **changes: float) -> Machine:
    """Return a machine whose products have other shapes (`GemmShape`), of all types alike."""
    shapes = {name: dataclasses.replace(one, **changes) for name, one in machine.gemm_shape.items()}
    return dataclasses.replace(machine, gemm_shape=shapes)


def slow_where_misaligned(machine: Machine, factor: float = 1e6) -> Machine:
    """Return a machine on which products whose columns are not aligned take so much longer."""
    return dataclasses.replace(machine, gemm_shape={one.name: GemmShape(misaligned=factor) for one in MEASURED})
