"""
What each kind of operation of a call costs alone and together with others.

    mpiexec -n 4 python tests/perf/parts.py OUT.json SIZE PLACE ["tile=2048 chunks=8" ...]

Runs a plan's operation list again with some bodies left out and every wait, event and flag kept, so
that what remains happens in the same order on the same lanes. "unordered" leaves the waits out too.
The results are wrong of course; only the times are of interest.
"""

import dataclasses
import json
import statistics
import sys
import time

import numpy as np
from mpi4py import MPI
from sweep import options_of

import uncut_mpi as um
from uncut_mpi.command.arguments import parse
from uncut_mpi.command.product import generated_sources, make_product, reset_result
from uncut_mpi.model.dtypes import DType
from uncut_mpi.planning.lower import Code

READ, WRITE, LINK, GEMM, COMBINE = "host reads", "host writes", "device copies", "products", "combines"
COPIES = (READ, WRITE, LINK)
SETS = [
    (READ, WRITE, LINK, GEMM, COMBINE),
    (READ,),
    (READ, WRITE),
    (READ, LINK),
    (READ, GEMM),
    (READ, LINK, GEMM),
    (READ, WRITE, LINK),
    (LINK,),
    (WRITE,),
    (GEMM,),
    (LINK, GEMM, COMBINE),
    (),
]


def kinds_of(program):
    """Return the kind of every operation ("" for those that only order others) and its bytes."""
    kinds, sizes = [], []
    in_host = program.in_host()
    for operation in program.operations:
        kind, size = "", 0
        if operation["code"] == Code.GEMM:
            kind = GEMM
        elif operation["code"] == Code.COMBINE:
            kind = COMBINE
        elif operation["code"] == Code.COPY:
            to, source = program.operands[operation["first_operand"] : operation["first_operand"] + 2]
            size = int(to["rows"] * to["cols"]) * 8
            from_host, to_host = (in_host[operand["buffer"]] for operand in (source, to))
            kind = READ if from_host else WRITE if to_host else LINK
        kinds.append(kind)
        sizes.append(size)
    return np.array(kinds), np.array(sizes)


def report(size, place, row):
    """Print one line for a set of parts."""
    rates = {kind: max(moved[kind] for moved in row["bytes"]) / row["median_s"] / 1e9 for kind in COPIES}
    text = ", ".join(f"{kind} {rate:.1f} GB/s" for kind, rate in rates.items() if rate)
    name = (" + ".join(row["parts"]) or "nothing") + (", unordered" if row["unordered"] else "")
    print(
        f"{size} {place} {row['options']} T={row['tile']} {name:76s} "
        f"{row['median_s'] * 1e3:8.3f} ms, min {min(row['samples_s']) * 1e3:8.3f}; {text}",
        flush=True,
    )


def main():
    """Print a line per set of parts: median and minimum time of the slowest rank, and the rates of its copies."""
    out, size, place, *texts = sys.argv[1:]
    arguments = parse(["-m", size, "--place", place])
    n = int(size)
    rows = []
    with um.Session(MPI.COMM_WORLD, backend="cuda", timeout_s=20) as session:
        product = make_product(session, arguments, (n, n, n), DType.f64, generated_sources(arguments, n, n, n), "F")
        for text in texts or [""]:
            with session.plan(product.a, product.b, product.c, reads_c=True, options=options_of(text)) as plan:
                whole = plan._plan
                program = whole.program
                kinds, sizes = kinds_of(program)
                for keep, unordered in [(keep, False) for keep in SETS] + [((READ,), True), ((READ, WRITE), True)]:
                    left = np.isin(kinds, keep) if unordered else np.isin(kinds, (*keep, ""))
                    plan._keep(
                        dataclasses.replace(
                            whole, program=dataclasses.replace(program, operations=program.operations[left])
                        )
                    )
                    samples = []
                    for _ in range(7):
                        session.barrier()
                        start = time.perf_counter()
                        plan.execute(1.0, 1.0)
                        samples.append(time.perf_counter() - start)
                    slowest = [max(x) for x in zip(*session.gather_values(samples[2:]), strict=True)]
                    row = {
                        "options": text,
                        "tile": plan.summary.tile,
                        "parts": keep,
                        "unordered": unordered,
                        "median_s": statistics.median(slowest),
                        "samples_s": slowest,
                        "bytes": session.gather_values(
                            {kind: int(sizes[left & (kinds == kind)].sum()) for kind in COPIES}
                        ),
                    }
                    rows.append(row)
                    if session.rank == 0:
                        report(size, place, row)
        reset_result(session, product)
        if session.rank == 0:
            with open(out, "w", encoding="utf-8") as file:
                json.dump({"size": n, "place": place, "devices": session.device_names, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
