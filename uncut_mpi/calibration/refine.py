"""
The last step of a calibration: what whole products say about sums of what was measured alone. Pure.

Probes measure one thing at a time. In a product copies, flags and kernels meet, clocks sink under load, and small costs
that no probe sees add up. A few numbers of the machine are therefore moved. The rates of products are those that traced
calls show; the others are moved by coordinate descent, until the simulated times of measured products fit best. What a
short product takes longer in a traced call is no measure of its cost. Where it waits for copies its operands are in no
cache, and the copies are the limit (``docs/performance.md``, 2026-11-23).

What moves is what to expect (rates, `Port.typical_gb_per_s`, latencies). What is possible (best rates, capacities,
bandwidths) stays, or grows where products show more (`uncut_mpi.calibration.peaks`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from uncut_mpi.calibration.peaks import Done, unbeaten
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.ports import Port
from uncut_mpi.planning.schedule import Kind, Schedule
from uncut_mpi.planning.simulate import simulate

_PASSES: Final = 3
_SCALES: Final = (4.0, 2.0, 1.0, 0.5, 0.25)  # the first steps are large: numbers that explain the same trap small ones
_PROGRESS: Final = 1e-4
_LEAST_GAIN: Final = 1e-6
_SQUARES_WEIGHT: Final = 2.0
_TELLING_S: Final = 5e-5


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """
    A product that was measured.

    Attributes
    ----------
    schedule : Schedule
        What ran.
    seconds : float
        Median over its calls of the slowest rank's time.
    task_s : ndarray of float64, shape (number of tasks,), or None
        What each task of one call took, if it was traced; NaN for a JOIN.
    best_s : float
        The shortest of those calls; as `seconds` if not given.
    """

    schedule: Schedule
    seconds: float
    task_s: np.ndarray | None = None
    best_s: float = 0.0

    @property
    def done(self) -> Done:
        """The product and its best time."""
        return Done(self.schedule.problem, self.schedule.placement, self.best_s or self.seconds)

    @property
    def name(self) -> str:
        """The product and its scheduler, in words."""
        problem = self.schedule.problem
        extents = f"{problem.m}×{problem.n}×{problem.k}"
        return f"{problem.arithmetic.name} {extents} at {self.schedule.placement} by {self.schedule.scheduler}"


@dataclasses.dataclass(frozen=True, slots=True)
class Refinement:
    """
    What `refine` moved and how well the result fits.

    Attributes
    ----------
    parameters : mapping of str to float
        By name; those of `STEPS`, and ``rate TYPE`` for every type observed.
    errors : tuple of float
        (simulated - measured) / measured of every observation.
    products : tuple of str
        What was observed, in words.
    """

    parameters: Mapping[str, float]
    errors: tuple[float, ...]
    products: tuple[str, ...]

    @property
    def median_error(self) -> float:
        """Median of the errors' sizes."""
        return float(np.median(np.abs(self.errors)))

    @property
    def worst_error(self) -> float:
        """The largest size of an error."""
        return float(np.max(np.abs(self.errors)))

    @property
    def worst_product(self) -> str:
        """What has the largest error."""
        return self.products[int(np.argmax(np.abs(self.errors)))]


# Start, step, least and most of each number that moves. Seconds are added, factors multiply. What several could
# explain goes to the first of them.
STEPS: Final[Mapping[str, tuple[float, float, float, float]]] = {
    "call": (0.0, 2e-5, 0.0, 1e-2),
    "device latency": (0.0, 4e-6, 0.0, 1e-3),
    "host latency": (0.0, 4e-6, 0.0, 1e-3),
    "flag latency": (0.0, 4e-6, 0.0, 1e-3),
    "event latency": (0.0, 2e-6, 0.0, 1e-3),
    "kernel overhead": (0.0, 4e-6, 0.0, 1e-3),
    "host ports": (1.0, 0.04, 0.3, 1.3),  # probes get less of the host than products when others use it meanwhile
    "device ports": (1.0, 0.04, 0.3, 1.0),
}
_STANDS_IN: Final = {"f16": "bf16", "bf16": "f16", "i8": "bf16", "e4m3": "bf16", "c64": "f32", "c128": "f64"}
_RATE: Final = (1.0, 0.04, 0.3, 1.0)


def refine(machine: Machine, observations: Sequence[Observation]) -> tuple[Machine, Refinement]:
    """
    Return the machine that explains measured products best, and what was moved.

    Parameters
    ----------
    machine : Machine
        As probes describe it, without typical capacities.
    observations : sequence of Observation
        At least one; of several sizes, types and placements, or what is not exercised stays.
    """
    dtypes = sorted({one.schedule.problem.arithmetic.name for one in observations if one.schedule.problem.has_product})
    seen: dict[str, float] = {f"rate {dtype}": one for dtype, one in rates_in_calls(machine, observations).items()}
    every = {**STEPS, **{f"rate {dtype}": _RATE for dtype in dtypes}}
    steps = {name: step for name, step in every.items() if name not in seen}
    found = {name: seen.get(name, start) for name, (start, *_) in every.items()}
    best = _misfit(_log_errors(adjusted(machine, found), observations))
    for scale in _SCALES:
        for _ in range(_PASSES):
            before = best
            for name, (_, step, least, most) in steps.items():
                for direction in (1.0, -1.0):
                    while True:
                        value = min(max(found[name] + direction * scale * step, least), most)
                        if value == found[name]:
                            break
                        moved = {**found, name: value}
                        misfit = _misfit(_log_errors(adjusted(machine, moved), observations))
                        if misfit >= best - _LEAST_GAIN:
                            break
                        best, found = misfit, moved
            if before - best < _PROGRESS:
                break
    result = unbeaten(adjusted(machine, found), [one.done for one in observations])
    errors = np.exp(_log_errors(result, observations)) - 1.0
    return result, Refinement(found, tuple(errors.tolist()), tuple(one.name for one in observations))


def rates_in_calls(machine: Machine, observations: Sequence[Observation]) -> dict[str, float]:
    """
    Return by type what traced products run at inside calls, as a factor of what the machine says.

    Long products count, by their time, and only those that have their device to themselves.
    """
    said: dict[str, float] = {}
    took: dict[str, float] = {}
    for dtype, expected, measured in _products(machine, observations):
        long = expected >= _TELLING_S
        said[dtype] = said.get(dtype, 0.0) + float(expected[long].sum())
        took[dtype] = took.get(dtype, 0.0) + float(measured[long].sum())
    _, _, least, most = _RATE
    return {dtype: min(max(said[dtype] / took[dtype], least), most) for dtype in took if took[dtype] > 0}


def _products(machine: Machine, observations: Sequence[Observation]) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield type, expected and measured seconds of the traced products that have their device to themselves."""
    for one in observations:
        if one.task_s is None or one.schedule.scheduler != "kblocks" or not one.schedule.problem.has_product:
            continue
        run = simulate(one.schedule, machine)
        products = one.schedule.tasks["kind"] == Kind.GEMM
        yield one.schedule.problem.arithmetic.name, (run.end_s - run.start_s)[products], one.task_s[products]


def adjusted(machine: Machine, parameters: Mapping[str, float]) -> Machine:
    """Return a machine whose numbers to expect are moved as `Refinement.parameters` say."""
    devices, host = machine.num_ranks, machine.host
    latency = machine.latency_s.copy()
    latency[:devices, :devices] += parameters["device latency"]
    latency[host, :devices] += parameters["host latency"]
    latency[:devices, host] += parameters["host latency"]
    return dataclasses.replace(
        machine,
        latency_s=latency,
        ports=tuple(
            _expecting(
                port,
                port.expected_gb_per_s
                * parameters["host ports" if any(host in link for link in port.links) else "device ports"],
            )
            for port in machine.ports
        ),
        typical_gemm_tflop_per_s={
            dtype: rate * _rate_of(parameters, dtype) for dtype, rate in machine.typical_gemm_tflop_per_s.items()
        },
        gemm_shape={
            # C is written at the memory's pace, which does not fall with the rate.
            dtype: dataclasses.replace(
                shape,
                overhead_s=shape.overhead_s + parameters["kernel overhead"],
                half_depth=shape.half_depth * _rate_of(parameters, dtype),
            )
            for dtype, shape in machine.gemm_shape.items()
        },
        costs=dataclasses.replace(
            machine.costs,
            flag_latency_s=machine.costs.flag_latency_s + parameters["flag latency"],
            event_latency_s=machine.costs.event_latency_s + parameters["event latency"],
            engine_latency_s=machine.costs.engine_latency_s + parameters["event latency"],
            call_s=machine.costs.call_s + parameters["call"],
        ),
    )


def _expecting(port: Port, typical_gb_per_s: float) -> Port:
    return dataclasses.replace(
        port,
        capacity_gb_per_s=max(port.capacity_gb_per_s, typical_gb_per_s),
        typical_gb_per_s=typical_gb_per_s,
    )


def _rate_of(parameters: Mapping[str, float], dtype: str) -> float:
    """Return a type's factor; one that was not observed has that of the one most like it."""
    other = _STANDS_IN.get(dtype, dtype)
    return parameters.get(f"rate {dtype}", parameters.get(f"rate {other}", 1.0))


def _log_errors(machine: Machine, observations: Sequence[Observation]) -> np.ndarray:
    ratios = [simulate(one.schedule, machine).seconds / one.seconds for one in observations]
    errors: np.ndarray = np.log(ratios)
    return errors


def _misfit(errors: np.ndarray) -> float:
    """Return the mean size of the errors and, so that no single one grows large, that of their squares."""
    return float(np.mean(np.abs(errors)) + _SQUARES_WEIGHT * np.mean(errors**2))
