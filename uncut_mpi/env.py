"""
What to paste into a bug report: ``python -m uncut_mpi.env``, alone or under mpiexec.

Says which versions, devices, limits and settings there are, and whether a session opens. What is missing is said in its
line.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from uncut_mpi.command.entry import run_alone
from uncut_mpi.command.environment import parse, run
from uncut_mpi.spmd.launcher import rank_of_process


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run the command and return its exit status: 0, 2 after an error, or 130 after an interrupt.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments; those of the process by default.
    """
    return run_alone("uncut_mpi.env", parse, run, argv, speaks=rank_of_process() == 0)


if __name__ == "__main__":
    sys.exit(main())
