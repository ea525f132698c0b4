"""What a search minimises: time, energy, or their product (PARALiA, section 3.3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from uncut_mpi.errors import ParamError
from uncut_mpi.model.machine import Machine
from uncut_mpi.planning.schedule import HOST, Schedule
from uncut_mpi.planning.simulate import Simulation

Metric = Callable[[float, float], float]
"""From seconds and joules to what is minimised."""

METRICS: Final[Mapping[str, Metric]] = {
    "time": lambda seconds, joules: seconds,
    "pdp": lambda seconds, joules: joules,
    "edp": lambda seconds, joules: joules * seconds,
}
"""PERF, PDP (power-delay product, the energy) and EDP (energy-delay product)."""


def metric_of(name: str, *, watts_known: bool) -> Metric:
    """
    Return a metric by name.

    Raises
    ------
    ParamError
        If it does not exist, or needs watts and the machine has none.
    """
    if name not in METRICS:
        raise ParamError(f"metric {name!r} does not exist: use one of {', '.join(METRICS)}")
    if name != "time" and not watts_known:
        raise ParamError(
            f"metric {name} needs the devices' power, which is not known of this machine: "
            "calibrate where NVML gives it (python -m uncut_mpi.calibrate)"
        )
    return METRICS[name]


def watts_known(machine: Machine) -> bool:
    """Return whether the power of every device is known, as energy needs."""
    return bool((machine.busy_watts > 0).all())


def working_ranks(schedule: Schedule) -> np.ndarray:
    """Return the ranks whose devices take part: those with tasks, and owners of device memory that tasks touch."""
    touched = np.unique(schedule.regions["buffer"][schedule.operands["region"]])
    owners = schedule.buffers["owner"][touched]
    taking: np.ndarray = np.union1d(np.unique(schedule.tasks["rank"]), owners[owners != HOST])
    return taking


def energy_j(simulation: Simulation) -> float:
    """
    Return the energy of a run on the devices that take part.

    Each draws its power at rest throughout, and the difference to its power in a product while it computes
    (two-level form of PARALiA's W_exec; devices that take no part are not counted: they are free for others).
    """
    machine = simulation.machine
    ranks = working_ranks(simulation.schedule)
    idle, busy = machine.idle_watts[ranks], machine.busy_watts[ranks]
    computing = simulation.compute_busy_s[ranks]
    return float((idle * simulation.seconds + np.maximum(busy - idle, 0.0) * computing).sum())
