"""
What to paste into a bug report: ``python -m uncut_mpi.env``, alone or under mpiexec.

Says which versions, devices, limits and settings there are, and whether a session opens. What is missing is said in its
line.
"""

from __future__ import annotations

import functools
import sys

from uncut_mpi.command.entry import run_alone
from uncut_mpi.command.environment import parse, run
from uncut_mpi.spmd.launcher import rank_of_process

main = functools.partial(run_alone, "uncut_mpi.env", parse, run, speaks=rank_of_process() == 0)

if __name__ == "__main__":
    sys.exit(main())
