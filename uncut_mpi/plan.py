"""
The plan command: ``python -m uncut_mpi.plan``.

Chooses a schedule for a product on a machine that need not be there, and says what it expects of it and why;
uses neither MPI nor a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from uncut_mpi.command.entry import run_alone
from uncut_mpi.command.planning import parse, run


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run the command and return its exit status: 0, 2 after an error, or 130 after an interrupt.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments; those of the process by default.
    """
    return run_alone("uncut_mpi.plan", parse, run, argv)


if __name__ == "__main__":
    sys.exit(main())
