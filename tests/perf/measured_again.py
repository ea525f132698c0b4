"""
What machines say of schedules that were measured: no GPU.

    python3 tests/perf/measured_again.py NODE MACHINE...

Of every row kept in docs/performance/results for such a node (4xh200) that says with which options its schedule was
made: is it the same schedule today, by its digest? Those that are are simulated on the machines; printed are, by
scheduler and type, median size and mean of the errors.
"""

import json
import math
import statistics
import sys
from pathlib import Path

from sweep import options_of

from uncut_mpi.errors import UncutError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.machine_files import load_machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.planner import plan
from uncut_mpi.planning.simulate import simulate

RESULTS = Path(__file__).parents[2] / "docs" / "performance" / "results"
WANTED = {"m", "n", "k", "options", "digest", "median_s", "place", "dtype"}


def rows_of(node):
    """Yield every row of a node's files that says how its schedule was made."""
    for path in sorted(RESULTS.glob(f"*{node}*.json")):
        kept = json.loads(path.read_text())
        for row in kept.get("rows", ()) if isinstance(kept, dict) else ():
            said = isinstance(row, dict) and row.keys() >= WANTED and isinstance(row["options"], str)
            if said and row["options"] != "scheduler=auto":  # a search chooses as it does today
                yield row


def schedule_of(row, machine):
    """Return a row's schedule, or None if today it is another one."""
    problem = GemmProblem(row["m"], row["n"], row["k"], DType[row["dtype"]])
    try:
        options = options_of(row["options"])
        schedule = plan(problem, Placement.parse(row["place"]), machine.num_ranks, machine, options).schedule
    except (UncutError, TypeError):  # options of an earlier version
        return None
    return schedule if schedule.digest() == row["digest"] else None


def main():
    """Print the errors."""
    node, *names = sys.argv[1:]
    machines, found = [load_machine(name) for name in names], {}
    for row in rows_of(node):
        schedule = schedule_of(row, machines[0])
        if schedule is not None:
            errors = [math.log(simulate(schedule, machine).seconds / row["median_s"]) for machine in machines]
            found.setdefault((schedule.scheduler, row["dtype"]), []).append(errors)
    for (scheduler, dtype), errors in sorted(found.items()):
        of_machines = [
            f"{statistics.median(map(abs, one)):.3f} {statistics.fmean(one):+.3f}" for one in zip(*errors, strict=True)
        ]
        print(f"{scheduler} {dtype}: {len(errors)} rows; {'; '.join(of_machines)}")


if __name__ == "__main__":
    main()
