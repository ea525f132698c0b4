"""Power of the ranks' devices at rest, under load, and between products. Collective."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import numpy as np

from uncut_mpi.calibration.probes import Probe
from uncut_mpi.calibration.workbench import Workbench
from uncut_mpi.device.interface import Backend, Executable
from uncut_mpi.spmd.group import Group

_T = TypeVar("_T")
_IDLE_S: Final = 0.5
_WARM_S, _BUSY_S = 0.3, 1.0


def is_known(group: Group, backend: Backend) -> bool:
    """Return whether any rank's device tells its energy."""
    return bool(group.allgather_bytes(np.array([backend.energy_j() is not None])).any())


def at_rest(group: Group, backend: Backend) -> list[float]:
    """Return every device's power while nothing happens (W); 0 where unknown."""
    return _watts(group, backend, lambda: time.sleep(_IDLE_S))[0]


def under_load(bench: Workbench, probe: Probe, what: str) -> list[float]:
    """Return every device's power while a probe runs again and again (W); 0 where unknown."""
    with bench.bind(probe, what) as executable:
        _repeat(bench, executable, what, _WARM_S)
        return _watts(bench.group, bench.backend, lambda: _repeat(bench, executable, what, _BUSY_S))[0]


def between_runs(
    bench: Workbench, probe: Probe, seconds: float, what: str, *, idle: Sequence[float], busy: Sequence[float]
) -> list[float]:
    """
    Return every device's power in pauses (W): what the mean over runs with pauses leaves for the pauses.

    A device that has just multiplied keeps its clocks up for a while, and draws more than at rest.

    Parameters
    ----------
    probe : Probe
        What runs.
    seconds : float
        How long a run takes, some ms; pauses are as long.
    idle, busy : sequence of float
        Every device's power at rest and under load (W).
    """
    with bench.bind(probe, what) as executable:
        mean, (runs, elapsed_s) = _watts(
            bench.group, bench.backend, lambda: _repeat(bench, executable, what, _BUSY_S, pause_s=seconds)
        )
    duty = min(runs * seconds / elapsed_s, 0.9)
    found = [(watts - duty * most) / (1.0 - duty) for watts, most in zip(mean, busy, strict=True)]
    return [min(max(one, least), most) for one, least, most in zip(found, idle, busy, strict=True)]


def _repeat(
    bench: Workbench, executable: Executable, what: str, seconds: float, *, pause_s: float = 0.0
) -> tuple[int, float]:
    """Run a list until so much time has passed on rank 0, and return how often, and the time."""
    started, runs = 0.0, 0
    while True:
        begun, ended = bench.run(executable, what)[0, :2]
        started, runs = started or begun, runs + 1
        if ended - started >= seconds:
            return runs, ended - started
        if pause_s:
            time.sleep(pause_s)


def _watts(group: Group, backend: Backend, work: Callable[[], _T]) -> tuple[list[float], _T]:
    """Return every device's mean power while something happens, 0 where unknown, and what comes of it."""
    before, started = backend.energy_j(), time.perf_counter()
    result = work()
    after, ended = backend.energy_j(), time.perf_counter()
    watts = 0.0
    if before is not None and after is not None:
        watts = max(0.0, after - before) / (ended - started)
    found: list[float] = group.allgather_bytes(np.array([watts]), "gathering the power")[:, 0].tolist()
    return found, result
