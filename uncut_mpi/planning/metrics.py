"""What a search or PARALiA's choice of devices minimises: time, energy, or their product (PARALiA, section 3.3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from uncut_mpi.errors import ParamError
from uncut_mpi.model.locations import NOBODY
from uncut_mpi.model.machine import Machine

if TYPE_CHECKING:  # the package's own import needs the names of metrics, and no core
    from uncut_mpi.planning.schedule import Schedule
    from uncut_mpi.planning.simulate import Simulation


class Cost(NamedTuple):
    """What a call takes: its time (s) and the energy of all devices (J)."""

    seconds: float
    energy_j: float


class Metric(NamedTuple):
    """
    Something to minimise.

    Attributes
    ----------
    about : str
        What it is, in the words of the help.
    of : callable
        From a `Cost` to a number; less is better.
    unit : str
        Of that number.
    needs_watts : bool
        Whether the power of every device has to be known.
    """

    about: str
    of: Callable[[Cost], float]
    unit: str
    needs_watts: bool = True

    def value(self, run: Simulation) -> float:
        """Return the number of a simulated run."""
        return self.of(Cost(run.seconds, energy_j(run)))


def working_ranks(schedule: Schedule) -> np.ndarray:
    """Return the ranks whose devices take part: those with tasks, and owners of device memory that tasks touch."""
    touched = np.unique(schedule.regions["buffer"][schedule.operands["region"]])
    owners = schedule.owners()[touched]
    taking: np.ndarray = np.union1d(np.unique(schedule.tasks["rank"]), owners[owners != NOBODY])
    return taking


def device_energy_j(simulation: Simulation) -> np.ndarray:
    """
    Return what each rank's device draws while a call lasts, in joules, shape (num_ranks,).

    For the time with a product or a COMBINE to run it is the power at work (``busy_watts``, PARALiA's W_exec). For the
    rest of the call it is that between products (``active_watts``; at rest where that is unknown) if the device takes
    part. If it does not, it is the power at rest (``idle_watts``).
    """
    machine, computing_s = simulation.machine, simulation.compute_busy_s
    waiting = machine.idle_watts.copy()
    working = working_ranks(simulation.schedule)
    waiting[working] = np.maximum(waiting, machine.active_watts)[working]
    more = np.maximum(machine.busy_watts - waiting, 0.0)
    energy: np.ndarray = waiting * simulation.seconds + more * computing_s
    return energy


def energy_j(simulation: Simulation) -> float:
    """
    Return the energy of a call in joules: that of the devices of all ranks of the session, idle ones too.

    PARALiA's metrics build on "the total power consumption of all GPUs in the multi-GPU setup" (section 3.3). A GPU
    that is left out draws its power at rest for as long as the call lasts.
    """
    return float(device_energy_j(simulation).sum())


METRICS: Final[Mapping[str, Metric]] = {
    "time": Metric("the time of a call", lambda cost: cost.seconds, "s", needs_watts=False),
    "pdp": Metric("the energy of all devices meanwhile, idle ones too", lambda cost: cost.energy_j, "J"),
    "edp": Metric("that energy times the time", lambda cost: cost.energy_j * cost.seconds, "J s"),
}
"""By name: PERF, PDP (power-delay product, the energy) and EDP (energy-delay product)."""


def check_metric(name: str) -> None:
    """Raise `ParamError` if there is no metric of this name."""
    if name not in METRICS:
        raise ParamError(f"metric {name!r} does not exist: use one of {', '.join(METRICS)}")


def metric_of(name: str, machine: Machine) -> Metric:
    """
    Return a metric by name.

    Raises
    ------
    ParamError
        If it does not exist, or needs watts and the machine has none.
    """
    check_metric(name)
    if METRICS[name].needs_watts and not watts_known(machine):
        raise ParamError(
            f"metric {name} needs the devices' power, which is not known of this machine: "
            "calibrate where NVML gives it (python -m uncut_mpi.calibrate)"
        )
    return METRICS[name]


def watts_known(machine: Machine) -> bool:
    """Return whether the power of every device is known, as energy needs."""
    return bool((machine.busy_watts > 0).all())
