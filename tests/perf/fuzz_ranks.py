"""
Makes random sequences of calls on all ranks (tests/helpers/sequences.py), as many steps as are asked for.

    mpiexec -n 3 python3 -m mpi4py -m tests.perf.fuzz_ranks [STEPS [SEED]]

Every rank runs what is ready in random order, after random pauses, and delivers flags late: each call is another
interleaving. With UNCUT_MPI_RANKS_PER_NODE so many ranks are taken for a node, and messages go between these.

They come in parts, of the seeds SEED + 0, 1, 2, … It ends with the first step that is wrong, whose seed it says, and
status 1. One part again: STEPS 0 and its seed.
"""

from __future__ import annotations

import collections
import sys

from mpi4py import MPI

from tests.helpers.sequences import run

PART = 500


def main(steps: int = 10_000, seed: int = 0) -> int:
    comm, done = MPI.COMM_WORLD, collections.Counter[str]()
    while not done or done["steps"] < steps:
        try:
            done.update(run(comm, seed, PART))
        except AssertionError as error:  # the same on all ranks
            if comm.rank == 0:
                print(error)
            return 1
        seed += 1
    if comm.rank == 0:
        print(f"{done.pop('steps')} steps on {comm.size} ranks: all right; of the calls so many worked:")
        print(", ".join(f"{name} {count}" for name, count in sorted(done.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
