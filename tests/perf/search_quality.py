"""
How much the search's budget costs: ``python tests/perf/search_quality.py [OUT.json [BUDGET...]]``.

For each of the 305 irregular problems of the Uncut-GEMMs paper on the 8 ranks of karolina-8xa100: predicted time of
the choice with each budget over that of a search without one, and the time that the searches take.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from uncut_mpi.bench.datasets import uncut_irregular
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.machine_files import load_machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.evaluation import DEFAULT_BUDGET_TASKS
from uncut_mpi.planning.search import search

UNLIMITED = 10**7


def main() -> None:
    """Print, per budget, how many choices are within 2 % of the unlimited one, and times."""
    out = sys.argv[1] if len(sys.argv) > 1 else None
    budgets = [int(word) for word in sys.argv[2:]] or [DEFAULT_BUDGET_TASKS]
    machine = load_machine("karolina-8xa100")
    rows = []
    for case in uncut_irregular():
        problem = GemmProblem(case.m, case.n, case.k, DType.f64, "N", "N")
        row: dict[str, object] = {"case": list(case)}
        for budget in (*budgets, UNLIMITED):
            started = time.perf_counter()
            found = search(problem, Placement.parse(case.placement), 8, machine, budget_tasks=budget)
            row[str(budget)] = [found.best.predicted_s, found.tasks_simulated, time.perf_counter() - started]
        rows.append(row)
        if out is not None:
            with open(out, "w", encoding="utf-8") as file:
                json.dump(rows, file)
    best = np.array([row[str(UNLIMITED)][0] for row in rows])
    for budget in budgets:
        predicted, tasks, seconds = np.array([row[str(budget)] for row in rows]).T
        lost = predicted / best - 1
        print(
            f"budget {budget}: {np.mean(lost <= 0.02):.1%} of {len(rows)} within 2 %, worst {lost.max():.1%}, "
            f"{np.median(tasks):.0f} tasks and {np.median(seconds) * 1e3:.0f} ms in the median, at most "
            f"{seconds.max() * 1e3:.0f} ms"
        )


if __name__ == "__main__":
    main()
