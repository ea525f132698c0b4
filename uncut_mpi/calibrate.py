"""
Measuring a machine: ``mpiexec -n RANKS python -m uncut_mpi.calibrate``.

Measures links, products and latencies on whatever the ranks have, prints them on rank 0 and keeps the
machine for later sessions. The exit status is 0 only if every rank succeeded and the litmus passed.
"""

from __future__ import annotations

import functools
import sys

from uncut_mpi.command.calibrate_arguments import parse_calibrate
from uncut_mpi.command.ranks import run_on_ranks

main = functools.partial(
    run_on_ranks, "uncut_mpi.calibrate", parse_calibrate, "uncut_mpi.command.calibrate_job:run_calibration"
)

if __name__ == "__main__":
    sys.exit(main())
