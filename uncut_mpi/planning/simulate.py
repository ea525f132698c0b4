"""
Discrete-event simulation: when each task of a schedule starts and ends on a machine.

The inner loop is native. Modelled are the order on lanes, issuing, copies under the ports that they share, products,
and sums. `simulate` says how each of them is modelled.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable

import numpy as np

from uncut_mpi import _native
from uncut_mpi.errors import ParamError, TopologyError, reason
from uncut_mpi.model.costs import (
    HOST_COPY_GB_PER_S,
    HOST_TRANSPOSED_PER_S,
    REST_GAIN,
    TRANSPOSING_SHARE,
)
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.machine import Machine
from uncut_mpi.planning.lower import tables_in_core
from uncut_mpi.planning.schedule import Kind, Schedule, rows_by_rank


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Simulation:
    """
    A schedule's run as the model sees it.

    Attributes
    ----------
    schedule : Schedule
        What was simulated.
    machine : Machine
        On what.
    start_s, end_s : ndarray of float64, shape (number of tasks,)
        When each task begins and ends, from the moment that every rank begins to issue, with clocks as they are
        after a rest.
    throttled_s : ndarray of float64, shape (num_ranks,)
        What the products of each rank take longer in a loop, at the power limit of its device.
    """

    schedule: Schedule
    machine: Machine
    start_s: np.ndarray
    end_s: np.ndarray
    throttled_s: np.ndarray

    @property
    def seconds(self) -> float:
        """Until the last task has ended, at the power limit."""
        return float(self.end_s.max(initial=0.0) + self.throttled_s.max(initial=0.0))

    @property
    def compute_busy_s(self) -> np.ndarray:
        """Return for how long each rank's device has a product or a COMBINE to run, shape (num_ranks,)."""
        busy = np.zeros(self.schedule.num_ranks)
        computing = np.flatnonzero(np.isin(self.schedule.tasks["kind"], (Kind.GEMM, Kind.COMBINE)))
        ranks = self.schedule.tasks["rank"][computing]
        for rank, rows in enumerate(rows_by_rank(ranks, self.schedule.num_ranks)):
            own = computing[rows]
            busy[rank] = union_seconds(self.start_s[own], self.end_s[own])
        return busy

    @property
    def idle_share(self) -> np.ndarray:
        """Return which part of the run each rank's device computes nothing, shape (num_ranks,)."""
        if self.seconds == 0:
            return np.zeros(self.schedule.num_ranks)
        share: np.ndarray = 1.0 - (self.compute_busy_s + self.throttled_s) / self.seconds
        return share

    def transfers(self) -> np.ndarray:
        """Return the number of copies per [source, destination], hosts last, int64 of shape (ends, ends)."""
        return self._count(bytes_moved=False)

    def transferred_bytes(self) -> np.ndarray:
        """Return the bytes copied per [source, destination], hosts last, int64 of shape (ends, ends)."""
        return self._count(bytes_moved=True)

    def _count(self, *, bytes_moved: bool) -> np.ndarray:
        table = np.zeros(self.machine.bandwidth_gb_per_s.shape, np.int64)
        copies = self.schedule.copies()
        np.add.at(table, (copies[:, 1], copies[:, 2]), copies[:, 3] if bytes_moved else 1)
        return table


def simulate(schedule: Schedule, machine: Machine, *, issuing_threads: int = 0) -> Simulation:
    """
    Return when each task of a schedule runs on a machine.

    Pure and deterministic. At least a million tasks per second.

    Parameters
    ----------
    schedule : Schedule
        Checked (`Schedule.check`).
    machine : Machine
        With as many ranks.
    issuing_threads : int, default 0
        Host threads that issue for all ranks together; 0: each rank has its own.

    Raises
    ------
    ParamError
        If the machine has another number of ranks, or `issuing_threads` is negative.
    TopologyError
        If the machine has no GEMM rate for a type of the schedule.

    Notes
    -----
    * **Order.** Lanes are first in, first out; a task starts when the task before it on its lane and all it awaits have
      ended and it has been issued. What a task awaits on another lane is seen `event_latency_s` after its end
      (`engine_latency_s` between copies and kernels, `kernel_latency_s` between kernels). On another rank it is seen
      `flag_latency_s` after. Flags that are set already and those that are written take time of the lane itself
      (`wait_lane_s`, `signal_lane_s`).
    * **Issuing.** From `call_s` after the start of a call on, each rank's operations are issued in the global order by
      one thread at `Machine.costs`. Or `issuing_threads` threads issue for all ranks, as in libraries with one process.
      Nothing holds it up.
    * **Copies.** After the link's latency a copy moves at its max-min fair rate among all that run (`Machine.ports`),
      at most the link's bandwidth, less for narrow rows (`Machine.row_rates`). Where a device serves its copies one
      after another (`Machine.serial_copies`), it takes the lanes of a way in turn, latency included. (Ways are to other
      devices, from the host and to the host.) The end of a copy is known at the lane's next turn. Copies within host
      memory, on lanes of the host, are made in turn by the rank's worker, at `HOST_COPY_GB_PER_S` and within the host's
      own bandwidth, which all share. They cost nothing to issue, and are awaited and await by flags. It transposes
      `HOST_TRANSPOSED_PER_S` elements.
    * **Products** take the time of `GemmShape` alone on their device. A device serves kernels first come, first served;
      a later one gets the part that the earlier leave idle (their last wave), as far as it can use it
      (`GemmShape.idle_use`). Beside copies within the device a product is slower (`GemmShape.copy_share`).
    * **Power.** A device that never rests takes `GemmShape.sustained` times as long. What it takes longer is
      less by `REST_GAIN` of the time that it rests, and counts at the end: the slowest device decides.
    * **COMBINE** takes its bytes at `Machine.combine_gb_per_s`, half types at a rate of their own, and the whole device
      meanwhile. It goes before products, but waits for blocks that have begun (`GemmShape.sum_wait`). A COPY that
      transposes within a device is such a kernel, at `TRANSPOSING_SHARE` of the rate.
    * **JOIN** takes no time.
    """
    _check(schedule, machine)
    native = machine_in_core(machine, issuing_threads)
    try:
        return Simulation(schedule, machine, *_native.simulate(native, tables_in_core(schedule)))
    except ValueError as error:
        raise _cannot(machine, error) from None


class Simulations:
    """
    Simulations on a machine while the caller prepares the next ones, on a thread of the core and by who waits.

    As values they are those of `simulate`. A context manager: the thread ends with it, and what was begun and not
    waited for is dropped.

    Parameters
    ----------
    machine : Machine
        As for `simulate`.
    at_once : bool, optional
        Whether each is made when it begins, here: for a few, for which a thread takes longer to begin.

    Attributes
    ----------
    machine : SimulatedMachine
        The machine, as the core has it.
    """

    def __init__(self, machine: Machine, *, at_once: bool = False) -> None:
        self._machine, self._at_once = machine, at_once
        self.machine = machine_in_core(machine, 0)
        self._native = _native.Simulations(self.machine)

    def __enter__(self) -> Simulations:
        return self

    def __exit__(self, *_: object) -> None:
        self._native.close()

    def begin(self, schedule: Schedule) -> Callable[[], Simulation]:
        """
        Begin a simulation and return what waits for its end, which may be called once.

        Raises
        ------
        ParamError, TopologyError
            As `simulate`, here or at the end; ParamError, too, after the end of the context, or for a second call.
        """
        if self._at_once:
            made = simulate(schedule, self._machine)
            return lambda: made
        _check(schedule, self._machine)
        try:
            ticket = self._native.begin(tables_in_core(schedule))
        except IndexError:
            raise ParamError(_OVER) from None
        return lambda: Simulation(schedule, self._machine, *self._wait(ticket))

    def begin_kblocks(self, run: _native.KBlocksRun, dtype: DType) -> Callable[[], object]:
        """
        Begin to make a schedule of `kblocks` and to simulate it, and return what waits for its end, once.

        Parameters
        ----------
        run : KBlocksRun
            Of a problem for a machine of as many ranks; one that was not begun before.
        dtype : DType
            Of its products.

        Raises
        ------
        ParamError, TopologyError
            As `begin`, here or at the end.
        """
        self._machine.typical_gemm_rate(dtype)  # raises where there is none
        if self._at_once:
            run.make(self.machine)
            return lambda: None
        try:
            ticket = self._native.begin_kblocks(run)
        except IndexError:
            raise ParamError(_OVER) from None
        return functools.partial(self._wait, ticket)

    def _wait(self, ticket: int) -> tuple[np.ndarray, ...]:
        try:
            return self._native.wait(ticket)
        except IndexError:
            raise ParamError(_OVER) from None
        except ValueError as error:
            raise _cannot(self._machine, error) from None


_OVER = "this simulation is over: wait for it once, before its Simulations end"


def _check(schedule: Schedule, machine: Machine) -> None:
    if machine.num_ranks != schedule.num_ranks:
        raise ParamError(
            f"machine {machine.name} has {machine.num_ranks} ranks, the schedule {schedule.num_ranks}: "
            "use a machine of as many"
        )
    if schedule.problem.has_product:
        machine.typical_gemm_rate(schedule.problem.arithmetic)  # raises where there is none


def _cannot(machine: Machine, error: ValueError) -> TopologyError:
    return TopologyError(f"the schedule cannot be simulated on machine {machine.name}: {reason(error)}")


def union_seconds(start: np.ndarray, end: np.ndarray) -> float:
    """Return the length of the union of intervals."""
    if not len(start):
        return 0.0
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    reach = np.maximum.accumulate(end)
    gaps = np.maximum(start[1:] - reach[:-1], 0.0).sum()
    return float(reach[-1] - start[0] - gaps)


@functools.lru_cache(maxsize=8)
def machine_in_core(machine: Machine, issuing_threads: int) -> _native.SimulatedMachine:
    """
    Return a machine's numbers in bytes and seconds; machines are frozen, and searches use one many times.

    Parameters
    ----------
    machine, issuing_threads
        As for `simulate`.
    """
    if issuing_threads < 0:
        raise ParamError(f"issuing_threads = {issuing_threads}: use 0 for one per rank, or a positive number")
    native = _native.SimulatedMachine()
    native.num_ranks, native.num_ends = machine.num_ranks, len(machine.bandwidth_gb_per_s)
    native.issuing_threads = issuing_threads
    native.serial_copies = machine.serial_copies
    native.bandwidth = (np.maximum(machine.bandwidth_gb_per_s, 1e-6) * 1e9).ravel().tolist()
    native.latency = machine.latency_s.ravel().tolist()
    native.port_capacity = [port.expected_gb_per_s * 1e9 for port in machine.ports]
    uses = [
        (source * native.num_ends + destination, number, weight)
        for number, port in enumerate(machine.ports)
        for (source, destination), weight in zip(port.links, port.weights, strict=True)
    ]
    native.port_uses = sorted(uses, key=operator.itemgetter(0))

    rates = [
        machine.typical_gemm_rate(dtype) if machine.has_gemm_rate(dtype) else np.zeros(machine.num_ranks)
        for dtype in DType
    ]
    native.gemm_rate = np.concatenate(rates).tolist()
    shapes = [machine.product_shape(dtype) for dtype in DType]
    native.products = [shape.native() for shape in shapes]
    native.multiprocessors = machine.multiprocessors.tolist()
    within = np.diag(machine.bandwidth_gb_per_s)[: machine.num_ranks]
    combine = np.where(machine.combine_gb_per_s > 0, machine.combine_gb_per_s, 0.5 * within)
    half = np.where(machine.half_combine_gb_per_s > 0, machine.half_combine_gb_per_s, combine)
    native.combine_rate = (np.maximum(combine, 1e-6) * 1e9).tolist()
    native.half_combine_rate = (np.maximum(half, 1e-6) * 1e9).tolist()
    rows = machine.row_rates
    native.row_device, native.row_in, native.row_out = list(rows.device), list(rows.host_in), list(rows.host_out)
    native.row_local = list(rows.local)

    native.host_copy_rate = HOST_COPY_GB_PER_S * 1e9
    disk = machine.disk
    native.file_read_rate, native.file_write_rate = disk.read_gb_per_s * 1e9, disk.write_gb_per_s * 1e9
    native.file_call_s = disk.call_s
    native.on_disk = machine.on_disk
    native.host_transposed_rate, native.transposing_share = HOST_TRANSPOSED_PER_S, TRANSPOSING_SHARE
    native.rest_gain = REST_GAIN
    for name, seconds in dataclasses.asdict(machine.costs).items():
        setattr(native, name, seconds)
    return native
