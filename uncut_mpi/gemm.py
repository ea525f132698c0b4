"""
The main job: ``mpiexec -n RANKS python -m uncut_mpi.gemm``.

Multiplies generated matrices or files on whatever the ranks have, measures, verifies, and says on rank 0 what was done.
The product itself is `Session.gemm`, in ``api/session_products.py``. The exit status is 0 only if every rank succeeded
and the check passed.
"""

from __future__ import annotations

import functools
import sys

from uncut_mpi.command.arguments import parse
from uncut_mpi.command.ranks import run_on_ranks

main = functools.partial(run_on_ranks, "uncut_mpi.gemm", parse, "uncut_mpi.command.job:run")

if __name__ == "__main__":
    sys.exit(main())
