"""
Plan for eight GPUs on any laptop, and read the schedule: no MPI, no GPU.

    python examples/04_read_a_schedule.py        (one process)
"""

from __future__ import annotations

from collections import Counter

from uncut_mpi import Machine, Placement, ScheduleOptions
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.locations import end_name
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.planner import plan
from uncut_mpi.planning.schedule import Kind

problem = GemmProblem(m=8192, n=8192, k=8192, dtype=DType.f64)
placement = Placement.parse("0,0,h")  # A and B on the device of rank 0, C in host memory
machine = Machine.uniform(8)  # equal links and devices, assumed rather than measured
planned = plan(problem, placement, 8, machine, ScheduleOptions(scheduler="uncut", tile=2048))
schedule = planned.schedule

kinds = Counter(Kind(kind).name for kind in schedule.tasks["kind"])
print(f"grid {schedule.grid[0]}x{schedule.grid[1]}, tile {schedule.tile}, digest {schedule.digest()}")
print("tasks:", ", ".join(f"{count} {name}" for name, count in sorted(kinds.items())))
print("bytes:", ", ".join(f"{size} {link}" for link, size in schedule.bytes_by_link().items()))
print(f"predicted {planned.predicted_s * 1e3:.2f} ms")

print("the first ten tasks of rank 3:")
copies = {task: (source, target, size) for task, source, target, size in schedule.copies().tolist()}
for task in [i for i, record in enumerate(schedule.tasks) if record["rank"] == 3][:10]:
    text = Kind(schedule.tasks[task]["kind"]).name
    if task in copies:
        source, target, size = copies[task]
        ends = " -> ".join(end_name(schedule.locations, end) for end in (source, target))
        text += f" {size} bytes, {ends}"
    print(f"  {task}: {text}, awaits {schedule.awaited(task).tolist()}")
