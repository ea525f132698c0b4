"""
The plan command: ``python -m uncut_mpi.plan``.

Chooses a schedule for a product on a machine that need not be there, and says what it expects of it and why;
uses neither MPI nor a GPU.
"""

from __future__ import annotations

import functools
import sys

from uncut_mpi.command.entry import run_alone
from uncut_mpi.command.planning import parse, run

main = functools.partial(run_alone, "uncut_mpi.plan", parse, run)

if __name__ == "__main__":
    sys.exit(main())
