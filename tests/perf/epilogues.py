"""
What bias and GELU cost as an epilogue of a product.

    mpiexec -n N python3 -m mpi4py tests/perf/epilogues.py OUT "bf16 16384" "f64 8192x8192x4096" ...

A problem is TYPE and SIZE (N or MxNxK). The product alone and the product with the epilogue take turns; a line has the
medians of the slowest rank, with the least and largest, and how many sums are written apart from products. Of halves
whose rows are contiguous (order C) the library writes C with its epilogue; of columns (order F) a kernel of ours does.
"""

import argparse
import dataclasses
import json
import statistics
import time

from common import in_turns, pool, say, source
from mpi4py import MPI

import uncut_mpi as um
from uncut_mpi.command.product import placed
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.places import Places
from uncut_mpi.planning.schedule import Kind

WARMUP, ROUNDS = 5, 21


def compare(session, dtype, shape, places, order):
    """Measure one product in one place, print a line of it, and return what was measured."""
    m, n, k = shape
    values = pool(dtype)
    extents, where = ((m, k), (k, n), (m, n)), (places.a, places.b, places.c)
    a, b, c = (
        placed(session, dataclasses.replace(source(*one, values), order=order), dtype, place)[0]
        for one, place in zip(extents, where, strict=True)
    )
    bias = session.empty((1, n), dtype.name, um.Layout.replicated())
    bias.local[:] = 0.25
    plain = session.plan(a, b, c, reads_c=False)
    ended = session.plan(a, b, c, reads_c=False, activation="gelu", bias=bias)

    def timed(work):
        session.barrier()
        start = time.perf_counter()
        work()
        return max(session.gather_values(time.perf_counter() - start))

    ways = {"plain": plain.execute, "epilogue": ended.execute}
    samples = {name: [] for name in ways}
    names = [*ways]
    for turn, at in enumerate(in_turns(len(ways), WARMUP + ROUNDS)):
        taken = timed(ways[names[at]])
        if turn >= WARMUP * len(ways):
            samples[names[at]].append(taken)
    middle = {name: statistics.median(of) for name, of in samples.items()}
    text = ", ".join(
        f"{name} {1e3 * middle[name]:.3f} [{1e3 * min(of):.3f}, {1e3 * max(of):.3f}] ms" for name, of in samples.items()
    )
    sums = int((ended.schedule.tasks["kind"] == Kind.COMBINE).sum())
    ratio = middle["epilogue"] / middle["plain"]
    say(session, f"  {places!s:16} order {order} {text}; {ratio:.3f}x; {sums} sums; {ended.summary.how}")
    for one in (a, b, c, bias):
        session.release(one)
    return {"places": str(places), "order": order, "sums": sums, "seconds": samples}


def main():
    """Measure all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("problems", nargs="+")
    parser.add_argument("--places", default="0,0,0;rows,cols,rows")
    parser.add_argument("--orders", default="CF")
    parser.add_argument("--backend", default="auto")
    given = parser.parse_args()
    with um.Session(MPI.COMM_WORLD, backend=given.backend, timeout_s=60) as session:
        found = {"device": session.device_names[0], "ranks": session.size, "problems": {}}
        for problem in given.problems:
            kind, size = problem.split()
            shape = [int(one) for one in size.split("x")]
            say(session, f"{problem}, {session.size} ranks, {session.device_names[0]}")
            found["problems"][problem] = [
                compare(session, DType.parse(kind), shape * (3 // len(shape)), Places.parse(place), order)
                for place in given.places.split(";")
                for order in given.orders
            ]
        if session.rank == 0:
            with open(given.out, "w", encoding="utf-8") as file:
                json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
