"""One measurement of the bench command: a method of ours, or another library in its process. Collective."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from uncut_mpi.api.gemm_plan import GemmPlan
from uncut_mpi.api.plan_maker import USUAL_FRACTION
from uncut_mpi.api.session import Session
from uncut_mpi.bench.arguments import BenchArguments, options_of
from uncut_mpi.bench.cubes import CubesPlan
from uncut_mpi.bench.datasets import Case
from uncut_mpi.bench.processes import (
    BASELINES,
    FLOOR,
    HOARDERS,
    BaselineError,
    BaselineProcess,
    SharedTask,
)
from uncut_mpi.bench.rivals.paralia import Predictor
from uncut_mpi.bench.rivals.parsec import received_bytes
from uncut_mpi.command.arguments import GemmArguments, parse
from uncut_mpi.command.check import CheckResult
from uncut_mpi.command.product import (
    Product,
    check_result,
    reset_result,
    slowest,
    timed_call,
    verify_product,
)
from uncut_mpi.command.report import fields_of
from uncut_mpi.errors import ParamError, named
from uncut_mpi.model.bounds import bound
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.places import Dealt, Place, Places
from uncut_mpi.model.problem import GemmProblem, Trans
from uncut_mpi.planning.options import ScheduleOptions, changed
from uncut_mpi.planning.ranks import ranks_by_use
from uncut_mpi.planning.setting import Setting

_FEWEST: Final = 3
_MUCH: Final = 16
"""Matrices of more than this part of a device's memory are a reason to end processes that give none back."""
_KEPT: Final = 8
"""Matrices of more than this part of a device's memory are not kept by other libraries from one round to the next."""
_COUNTED_S: Final = 0.5
"""
Calls go on for so long before their energy is read: NVML's counter moves every 0.1 s or so on an H100 and an H200.

Of shorter calls it told 0 to 1500 W (docs/performance.md, 2026-11-24, energy of short calls).
"""
_VERDICT: Final = ("passed", "error", "tolerance")

Facts = dict[str, Any]
"""What a measurement found, as it stands in the file."""


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """
    One measurement to make.

    Attributes
    ----------
    case : Case
        Extents and placement.
    dtype : DType
        Element type.
    method : str
        What multiplies.
    compute : int
        With how many devices.
    """

    case: Case
    dtype: DType
    method: str
    compute: int

    @property
    def trans_a(self) -> Trans:
        """How A is stored: transposed for Choi's bands, whose sends are contiguous then, as their authors keep it."""
        return "T" if self.method.partition(":")[0] == "bands" else "N"

    @property
    def problem(self) -> GemmProblem:
        """The product, as planners see it."""
        return GemmProblem(*self.case[:3], self.dtype, self.trans_a)

    def placement(self, num_ranks: int) -> Placement:
        """Return where the matrices live, of so many ranks."""
        return Places.parse(self.case.places(num_ranks)).bind(self.problem, num_ranks)

    def gemm_arguments(self, seed: int, num_ranks: int) -> GemmArguments:
        """Return the gemm command's arguments for this product of random data."""
        m, n, k, _ = self.case
        place = self.case.places(num_ranks)
        words = ["-m", str(m), "-n", str(n), "-k", str(k), "--place", place, "--seed", str(seed)]
        return parse([*words, "--dtype", self.dtype.name, "--trans-a", self.trans_a])

    def ranks(self, session: Session) -> list[int]:
        """Return the ranks that compute, those of most use first."""
        order = ranks_by_use(self.problem, self.placement(session.size), session.machine)
        return order[: self.compute]


class Measurer:
    """
    Measures methods of ours and other libraries' products alike.

    Methods are collective.
    """

    def __init__(self, session: Session, asked: BenchArguments) -> None:
        self._session, self._asked = session, asked
        cuda = session.backend_name == "cuda"
        self._devices = list(dict.fromkeys(session.device_uuids if cuda else map(str, range(session.size))))
        self._device_of = [self._devices.index(uuid) if cuda else r for r, uuid in enumerate(session.device_uuids)]
        self._processes: dict[str, BaselineProcess] = {}  # on rank 0
        self._shared: tuple[Product, SharedTask] | None = None  # on rank 0
        self._settings: dict[Entry, list[str]] = {}  # on rank 0, what other libraries found best in an earlier round
        self._begun: dict[str, tuple[Entry, Facts]] = {}  # of libraries whose processes have a task still

    def measure(self, one: Entry, product: Product, *, last: bool) -> Facts:
        """
        Return what a method takes, by the calls of one round; why not under ``"reason"``, if it cannot be had here.

        The `last` round of a problem reads the energy and verifies the result.

        Raises
        ------
        CapacityError, PlanError
            The same on every rank, if it cannot be done here.
        """
        backend = self._session.backend_name
        try:
            if one.method not in BASELINES:
                return self._own(one, product, last)
            if backend not in BASELINES[one.method]:
                raise BaselineError(f"it is for the {' or '.join(BASELINES[one.method])} backend, this is {backend}")
            return self._baseline(one, product, last)
        except (BaselineError, ParamError) as error:  # the latter of a method that needs watts, or all ranks
            self._begun.pop(one.method, None)
            return {"reason": str(error)}

    def forget(self) -> None:
        """Give back what was made for the product measured last."""
        if self._shared is None:
            return
        product, shared = self._shared
        self._shared = None
        shared.close()
        if self._much(_MUCH, product):
            for method in HOARDERS:
                if method in self._processes:
                    self._processes[method].close()

    def close(self) -> None:
        """End the processes of other libraries."""
        self.forget()
        for process in self._processes.values():
            process.close()

    def _much(self, factor: int, product: Product) -> bool:
        """Return whether so many products' matrices are more than a device's memory."""
        nbytes = product.dtype.itemsize * (product.m * product.n + product.m * product.k + product.k * product.n)
        return factor * nbytes > int(self._session.machine.memory_bytes.min())

    # -- ours --------------------------------------------------------------------------------

    def _own(self, one: Entry, product: Product, last: bool) -> Facts:
        session, asked = self._session, self._asked
        arguments = one.gemm_arguments(asked.seed, session.size)
        fewer = one.method == "one" or one.compute < session.size
        options = options_of(one.method, tuple(sorted(one.ranks(session))) if fewer else None)
        scalars = arguments.alpha, arguments.beta
        reset_result(session, product)
        session.barrier()
        started = time.perf_counter()
        with self._planned(one, product, options) as plan:
            planned_s = time.perf_counter() - started

            def calls(count: int) -> list[float]:
                return slowest(session, [timed_call(session, plan, *scalars) for _ in range(count)])

            first = planned_s + timed_call(session, plan, *scalars)
            while plan.tuning:
                timed_call(session, plan, *scalars)
            first_s, call_s = slowest(session, [first, timed_call(session, plan, *scalars)])
            facts = self._samples(calls, call_s, last, kept_back=1)
            if last:
                reset_result(session, product)
            facts["samples_s"] += [round(sample, 8) for sample in calls(1)]
            verdict = verify_product(session, product, arguments) if asked.check and last else None
            summary = plan.summary
        return {
            **facts,
            "first_call_s": first_s,
            "plan_s": summary.plan_s,
            "predicted_s": summary.predicted_s,
            **self._judged(one, verdict),
            "scheduler": summary.scheduler,
            "how": summary.how,
            "tasks": summary.tasks,
            "bytes": summary.bytes_by_link,
            "digest": summary.digest,
            "tried": summary.tried,
            **self._by_papers(one),
        }

    def _by_papers(self, one: Entry) -> Facts:
        """Return what two papers say of the same ranks: PARALiA's predictor (s), and PaRSEC's equation (1) (bytes)."""
        session, problem, ranks = self._session, one.problem, one.ranks(self._session)
        placement, said = one.placement(session.size), dict[str, Any]()
        if not placement.in_parts:
            said["paralia_s"] = Predictor(problem, placement, session.machine).workload(ranks).seconds
        if self._asked.dataset == "parsec":
            options = ScheduleOptions(device_memory=self._asked.device_memory or 0, devices=tuple(ranks))
            setting = Setting.of(problem, placement, session.size, session.machine, options)
            with contextlib.suppress(ParamError):  # which says that it is not about such nodes
                said["equation_1_bytes"] = round(received_bytes(setting))
        return said

    def _planned(self, one: Entry, product: Product, options: ScheduleOptions) -> GemmPlan | CubesPlan:
        session = self._session
        if one.method == "cubes":
            usual = int(USUAL_FRACTION * int(session.machine.memory_bytes.min()))
            options = changed(options, device_memory=self._asked.device_memory or usual)
            of_three = product.a, product.b, product.c
            return CubesPlan(session, of_three, one.problem, one.placement(session.size), one.trans_a, options)
        return session.plan(product.a, product.b, product.c, reads_c=True, trans_a=one.trans_a, options=options)

    # -- other libraries' --------------------------------------------------------------------

    def _baseline(self, one: Entry, product: Product, last: bool) -> Facts:
        session, asked = self._session, self._asked
        arguments = one.gemm_arguments(asked.seed, session.size)
        known, begun = self._begun.get(one.method, (None, {}))
        if known != one:
            begun = self._on_root(lambda: self._begin(one, product, arguments))
            self._begun[one.method] = one, begun

        def calls(count: int) -> list[float]:
            message = {"do": "time", "count": count}
            samples: list[float] = self._told(one, message, 3 * count * begun["call_s"])["samples_s"]
            return samples

        facts = self._samples(calls, begun["call_s"], last, kept_back=0)
        if last or self._much(_KEPT, product):
            # Only now: in host memory it is the C of every library that has a task still.
            self._on_root(self._poison)
            self._told(one, {"do": "end"})
            del self._begun[one.method]
        verdict = None
        if asked.check and last and one.method != FLOOR:
            result = session.empty_host((product.m, product.n), product.dtype, order="F")
            try:
                with session.together("copying a result"):
                    if self._shared is not None:
                        np.copyto(result.array, self._shared[1].result())
                verdict = check_result(session, product, result, arguments)
            finally:
                session.release(result)
        return {
            **facts,
            "first_call_s": begun["first_s"],
            "plan_s": None,
            "predicted_s": None,
            **self._judged(one, verdict),
            "scheduler": begun["library"],
            "how": begun["setting"],
            "settings": begun["settings"],
            "failed_settings": begun["failed"],
            "tasks": None,
            "bytes": None,
            "digest": None,
        }

    def _begin(self, one: Entry, product: Product, arguments: GemmArguments) -> Facts:
        """Give a task to its library's process. On rank 0 alone."""
        if self._shared is None or self._shared[0] is not product:
            self.forget()
            c = product.first_c.array
            self._shared = product, SharedTask(product.host_a.array, product.host_b.array, c, product.dtype)
        shared = self._shared[1]
        process = self._processes.get(one.method)
        if process is None or not process.alive:
            process = BaselineProcess(one.method, self._session.backend_name, self._devices)
            self._processes[one.method] = process
        places = tuple(map(self._place, (arguments.place.a, arguments.place.b, arguments.place.c)))
        compute = tuple(dict.fromkeys(self._device_of[rank] for rank in one.ranks(self._session)))
        task = shared.task(arguments.alpha.real, arguments.beta.real, (places[0], places[1], places[2]), compute)
        begun = process.ask({"do": "begin", "task": task.to_json(), "settings": self._settings.get(one)})
        self._settings[one] = [begun["setting"]]
        return begun

    def _poison(self) -> Facts:
        if self._shared is not None:
            self._shared[1].poison()
        return {}

    def _place(self, place: Place) -> int | str | None:
        """Return where a matrix is for a library: the number of a device, None for host memory, or how it is dealt."""
        if isinstance(place, Dealt):
            if self._device_of != list(range(self._session.size)):
                raise BaselineError("matrices are dealt to ranks, and some share a GPU")
            return str(place)
        return self._device_of[place.rank] if place.space == "device" and place.rank is not None else None

    def _told(self, one: Entry, message: Facts, more_s: float = 0.0) -> Facts:
        def ask() -> Facts:
            process = self._processes[one.method]
            return process.ask(message, process.patience_s + more_s)

        return self._on_root(ask)

    def _on_root(self, function: Callable[[], Facts]) -> Facts:
        """Return on every rank what rank 0 gets, or raise its BaselineError everywhere."""
        told: tuple[Facts, str | None] = {}, None
        if self._session.rank == 0:
            try:
                told = function(), None
            except BaselineError as error:
                told = {}, str(error)
            except Exception as error:  # the other ranks wait for an answer, whatever it is
                told = {}, named(error)
        facts: Facts
        facts, reason = self._session.gather_values(told)[0]
        if reason is not None:
            raise BaselineError(reason)
        return facts

    # -- both --------------------------------------------------------------------------------

    def _judged(self, one: Entry, verdict: CheckResult | None) -> Facts:
        """Return what no schedule can beat, and the verdict on the result, if there is one."""
        limit = bound(one.problem, one.placement(self._session.size), self._session.machine)
        found = dict.fromkeys(_VERDICT) if verdict is None else fields_of(verdict, *_VERDICT)
        return {"bound_s": limit.seconds, "limited_by": limit.limited_by, **found}

    def _samples(self, calls: Callable[[int], list[float]], call_s: float, last: bool, *, kept_back: int) -> Facts:
        """
        Return a round's timed calls after warm-up calls; of the last one the energy too, for which more calls follow.

        `calls` has the same times on every rank; `kept_back` of the calls are left to the caller, who prepares them.
        """
        session, asked = self._session, self._asked
        # Numbers of calls follow from times that all ranks know, so they are the same on every rank.
        cap_s = asked.time_cap_s / asked.rounds
        warmup = min(asked.warmup, int(0.5 * cap_s / call_s))
        warm = calls(warmup)
        expected_s = statistics.median(warm) if warm else call_s
        most, fewest = -(-asked.repeat // asked.rounds), -(-_FEWEST // asked.rounds)
        count = min(most, max(fewest, int(cap_s / expected_s)))
        timed = count - kept_back
        before = session.gather_values(session.energy_j() if last else None)
        samples = calls(timed)
        joules = None
        if None not in before:
            more = max(0, math.ceil((_COUNTED_S - sum(samples)) / expected_s))
            calls(more)
            used = [new - old for old, new in zip(before, session.gather_values(session.energy_j()), strict=True)]
            joules = sum(used) / (timed + more)
        return {"samples_s": [round(sample, 8) for sample in samples], "joules": joules}


def combined(one: Entry, rounds: Sequence[Facts]) -> Facts:
    """
    Return what several rounds of the same measurement found: all their samples, and the worst of their verdicts.

    A round that failed stands for all; what is found once, as the first call, is the first round's.
    """
    failed = [facts for facts in rounds if "samples_s" not in facts]
    if failed:
        return {"median_s": None, **failed[0]}
    samples = [sample for facts in rounds for sample in facts["samples_s"]]
    median_s = statistics.median(samples)
    verdicts = [facts for facts in rounds if facts["passed"] is not None]
    m, n, k, _ = one.case
    return {
        "median_s": median_s,
        "min_s": min(samples),
        "max_s": max(samples),
        "tflop_per_s": 2e-12 * m * n * k / median_s,
        **rounds[0],
        "samples_s": samples,
        "joules": rounds[-1]["joules"],
        # The verdict that would fail comes before those that would not.
        **({name: min(verdicts, key=_leeway)[name] for name in _VERDICT} if verdicts else {}),
    }


def _leeway(facts: Facts) -> tuple[bool, float]:
    return facts["passed"], -facts["error"]
