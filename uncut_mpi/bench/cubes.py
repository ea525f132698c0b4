"""The method ``cubes`` of the bench command: sub-problems one after the other, each a call of its own."""

from __future__ import annotations

import dataclasses
from types import TracebackType

from uncut_mpi.api.gemm_plan import GemmPlan
from uncut_mpi.api.matrix import Matrix
from uncut_mpi.api.plans import PlanSummary
from uncut_mpi.api.session import Session
from uncut_mpi.bench.rivals.cubes import Cube, cubes, largest_edge
from uncut_mpi.model.arguments import Number
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem, Trans
from uncut_mpi.planning.options import ScheduleOptions
from uncut_mpi.planning.setting import Setting


class CubesPlan:
    """
    What stands for the plan of a product in cubes. A context manager; methods are collective.

    Parameters
    ----------
    session : Session
        Whose ranks compute.
    matrices : tuple of Matrix
        A, B and C.
    problem, placement
        Of the product.
    trans_a : {"N", "T", "C"}
        How A is stored.
    options : ScheduleOptions
        Of each cube's schedule, with what a rank may use (`device_memory`).

    Attributes
    ----------
    summary : PlanSummary
        Of the first cube's plan, with the time, tasks and bytes of all.
    tuning : bool
        False, as of a plan.

    Raises
    ------
    CapacityError, ParamError
        As of `largest_edge`.
    """

    tuning = False

    def __init__(
        self,
        session: Session,
        matrices: tuple[Matrix, Matrix, Matrix],
        problem: GemmProblem,
        placement: Placement,
        trans_a: Trans,
        options: ScheduleOptions,
    ) -> None:
        self._matrices, self._trans_a = matrices, trans_a
        self._plans: dict[tuple[int, int, int], GemmPlan] = {}
        edge = largest_edge(Setting.of(problem, placement, session.size, session.machine, options))
        self._cubes = cubes(problem, edge)
        seconds, tasks, moved = 0.0, 0, dict[str, int]()
        for cube in self._cubes:
            extents = len(cube.rows), len(cube.cols), len(cube.k)
            if extents not in self._plans:
                a, b, c = self._views(cube)
                self._plans[extents] = session.plan(a, b, c, reads_c=True, trans_a=trans_a, options=options)
            about = self._plans[extents].summary
            seconds, tasks = seconds + about.predicted_s, tasks + about.tasks
            moved = {name: moved.get(name, 0) + nbytes for name, nbytes in about.bytes_by_link.items()}
        first = next(iter(self._plans.values())).summary
        self.summary: PlanSummary = dataclasses.replace(
            first,
            scheduler="cubes",
            how=f"{len(self._cubes)} cubes of {edge}, each {first.how}",
            predicted_s=seconds,
            tasks=tasks,
            bytes_by_link=moved,
        )

    def execute(self, alpha: Number = 1.0, beta: Number = 0.0) -> None:
        """Multiply, one cube after the other."""
        for cube in self._cubes:
            a, b, c = self._views(cube)
            plan = self._plans[len(cube.rows), len(cube.cols), len(cube.k)]
            plan.execute(alpha, beta if cube.is_first else 1.0, a=a, b=b, c=c)

    def _views(self, cube: Cube) -> tuple[Matrix, Matrix, Matrix]:
        """Return a cube's parts of A, B and C as they are stored."""
        rows, cols, k = (slice(one.start, one.stop) for one in (cube.rows, cube.cols, cube.k))
        a, b, c = self._matrices
        return a[rows, k] if self._trans_a == "N" else a[k, rows], b[k, cols], c[rows, cols]

    def __enter__(self) -> CubesPlan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for plan in self._plans.values():
            plan.close()
