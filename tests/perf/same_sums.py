"""
What sums that are the same everywhere cost (`ScheduleOptions.same_sums`), and whether they are.

    mpiexec -n N python3 -m mpi4py tests/perf/same_sums.py "f64 16384" "bf16 16384x8192x4096" ...

A problem is TYPE and SIZE (N or MxNxK). In each of the places (--places) the default plan and that with the option take
turns. A line has their medians, of the slowest rank, with the least and largest, and a digest of each C. With the
option it is to be the same in all places, and for any N.
"""

import argparse
import hashlib
import itertools
import statistics
import time

from common import in_turns, pool, say, source
from mpi4py import MPI

import uncut_mpi as um
from uncut_mpi.command.product import placed
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.places import Places

WARMUP, ROUNDS, ALPHA = 3, 15, 1.2345
OPTIONS = um.ScheduleOptions(), um.ScheduleOptions(same_sums=True)


def timed(session, plan):
    """Return what a call takes the slowest rank (s)."""
    session.barrier()
    start = time.perf_counter()
    plan.execute(ALPHA)
    return max(session.gather_values(time.perf_counter() - start))


def digest(session, c):
    """Return a digest of all of a matrix."""
    found = session.gather(c)
    text = None if found is None else hashlib.blake2b(found.T.tobytes("A"), digest_size=6).hexdigest()
    return session.gather_values(text)[0]


def compare(session, dtype, shape, places):
    """Measure one product in one place, print a line of it, and return the digests without and with the option."""
    m, n, k = shape
    values = pool(dtype)
    extents, where = ((m, k), (k, n), (m, n)), (places.a, places.b, places.c)
    made = [placed(session, source(*one, values), dtype, place) for one, place in zip(extents, where, strict=True)]
    a, b, c = (matrix for matrix, _ in made)
    plans = [session.plan(a, b, c, reads_c=False, options=options) for options in OPTIONS]
    samples, digests = ([], []), []
    for plan in plans:
        for _ in range(WARMUP):
            plan.execute(ALPHA)
        digests.append(digest(session, c))
    for which in in_turns(len(plans), ROUNDS):
        samples[which].append(timed(session, plans[which]))
    usual, same = (statistics.median(one) for one in samples)
    texts = [f"{1e3 * statistics.median(one):.2f} [{1e3 * min(one):.2f}, {1e3 * max(one):.2f}]" for one in samples]
    say(session, f"  {places!s:16} {texts[0]} ms, same_sums {texts[1]} ms, {same / usual:.2f}x; {' '.join(digests)}")
    for one in dict.fromkeys(itertools.chain(*made)):
        session.release(one)
    return digests


def main():
    """Measure all, and say of each product whether its bits were the same in all places."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problems", nargs="+")
    parser.add_argument("--places", default="0,0,0;h,h,h;rows,cols,rows")
    parser.add_argument("--backend", default="auto")
    given = parser.parse_args()
    with um.Session(MPI.COMM_WORLD, backend=given.backend, timeout_s=60) as session:
        for problem in given.problems:
            kind, size = problem.split()
            shape = [int(one) for one in size.split("x")]
            say(session, f"{problem}, {session.size} ranks, {session.device_names[0]}")
            found = [
                compare(session, DType.parse(kind), shape * (3 // len(shape)), Places.parse(place))
                for place in given.places.split(";")
            ]
            for name, several in zip(("without", "same_sums"), zip(*found, strict=True), strict=True):
                said = "the same bits in all places" if len({*several}) == 1 else "bits DIFFER"
                say(session, f"  {name}: {said}")


if __name__ == "__main__":
    main()
