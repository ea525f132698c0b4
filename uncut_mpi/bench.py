"""
Benchmarks: ``mpiexec -n RANKS python -m uncut_mpi.bench``.

Measures the papers' problems with several methods in one run, keeps every result as a line of JSON and
sums them up as the papers do. The exit status is 0 only if every rank succeeded and every result was right.
"""

from __future__ import annotations

import sys

from uncut_mpi.command.bench_arguments import parse_bench
from uncut_mpi.command.ranks import RankCommand

main = RankCommand("uncut_mpi.bench", parse_bench, "uncut_mpi.command.bench_job:run_bench")

if __name__ == "__main__":
    sys.exit(main())
