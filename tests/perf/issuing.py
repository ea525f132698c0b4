"""
What the executor takes to issue a list of operations, against a plain loop of the same driver and cuBLAS calls.

    nvcc -O2 -std=c++17 -o /tmp/issuing tests/perf/issuing.cu -lcuda -lcublas
    mpiexec -n 1 python3 -m mpi4py tests/perf/issuing.py /tmp/issuing OUT.json

One GPU, f64, lists of fewer operations than may be outstanding. Both are measured in turns, TURNS times; of each
turn the median of the calls.
"""

import json
import statistics
import subprocess
import sys
import tempfile

import numpy as np
from mpi4py import MPI

import uncut_mpi as um
from uncut_mpi.planning.lower import Code, lower

TURNS, CALLS = 5, 200
# Name, extents, placement, options: small tiles, of which nearly every operation is issued while the GPU is busy.
LISTS = (
    ("products alone", (512, 512, 8192), "000", um.ScheduleOptions(scheduler="uncut", tile=256)),
    ("A and B from the host", (256, 256, 16384), "hh0", um.ScheduleOptions(scheduler="uncut", tile=256)),
    ("all in the host", (1024, 1024, 1024), "hhh", um.ScheduleOptions(scheduler="uncut", tile=256, wr_lazy=False)),
)


def lines_of(schedule):
    """Return a rank's operations as the bare loop reads them, and how many there are of each kind."""
    listed = lower(schedule).rank_list(0)
    in_host = listed.in_host()
    lines, counts = [], {}
    for one in listed.operations:
        code, lane = Code(one["code"]), int(one["lane"])
        operands = listed.operands[one["first_operand"] : one["first_operand"] + one["num_operands"]]
        if code is Code.COPY:
            to, source = operands
            spaces = ["h" if in_host[end["buffer"]] else "d" for end in (source, to)]
            plain = to["cols"] <= 1 or (to["ld"] == to["rows"] and source["ld"] == source["rows"])
            lines.append(
                f"{'c' if plain else 'd'} {lane} {' '.join(spaces)} {to['rows']} {to['cols']} {source['ld']} {to['ld']}"
            )
        elif code is Code.GEMM:
            c, a, b = operands[:3]
            lines.append(f"g {lane} {c['rows']} {c['cols']} {a['cols']} {a['ld']} {b['ld']} {c['ld']}")
        elif code in (Code.RECORD, Code.WAIT_EVENT):
            lines.append(f"{'r' if code is Code.RECORD else 'w'} {lane} {one['slot']}")
        else:
            raise SystemExit(f"{code.name} has no counterpart in the bare loop")
        counts[lines[-1][0]] = counts.get(lines[-1][0], 0) + 1
    return lines, counts


def main():
    """Measure, print and write."""
    binary, out = sys.argv[1:]
    rows = []
    with um.Session(MPI.COMM_WORLD) as session:
        for name, (m, n, k), places, options in LISTS:
            made = []
            for place, shape in zip(places, ((m, k), (k, n), (m, n)), strict=True):
                empty = session.empty_host if place == "h" else session.empty_device
                matrix = empty(shape, np.float64, order="F", **({} if place == "h" else {"rank": 0}))
                matrix.array.fill(0.5)
                made.append(matrix)
            with session.plan(*made, options=options) as plan, tempfile.NamedTemporaryFile("w") as listed:
                lines, counts = lines_of(plan.schedule)
                listed.write("\n".join(lines) + "\n")
                listed.flush()
                ours, bare = [], []
                for _ in range(TURNS):
                    calls = [plan.execute(alpha=1.2345, beta=0.5).issue_s for _ in range(CALLS)]
                    ours.append(1e6 * statistics.median(calls))
                    said = subprocess.run([binary, listed.name], capture_output=True, text=True, check=True).stdout
                    bare.append(float(said))
            rows.append({"name": name, "operations": len(lines), "counts": counts, "ours_us": ours, "bare_us": bare})
            times = statistics.median(ours) / statistics.median(bare)
            print(
                f"{name}: {counts}: ours {statistics.median(ours):.1f} us, bare {statistics.median(bare):.1f} us, "
                f"{times:.3f} times",
                flush=True,
            )
            for matrix in made:
                session.release(matrix)
        device = session.device_names[0]
    with open(out, "w") as file:
        json.dump({"what": "issuing in turns, medians of calls", "device": device, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
