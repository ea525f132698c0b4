"""
Benchmarks: ``mpiexec -n RANKS python -m uncut_mpi.bench``.

All that is measured beside our own schedules. Nothing else imports it:

* `datasets`: the papers' problems. `rivals`: schedulers of other papers, which plans find by their names.
* `baselines`: other libraries' products, each in a process of its own (`processes`).
* `arguments`, `job`, `measure`, `summary`, `rates`: the command.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def main(argv: Sequence[str] | None = None, comm: Any = None) -> int:
    """
    Measure the papers' problems with several methods in one run; return the exit status. Collective.

    Every result is kept as a line of JSON, and all are summed up as the papers do. The status is 0 only if every rank
    succeeded and every result was right. Parameters are those of `uncut_mpi.command.ranks.run_on_ranks`.
    """
    from uncut_mpi.bench.arguments import parse_bench  # not for those who want a scheduler of this package
    from uncut_mpi.command.ranks import run_on_ranks

    return run_on_ranks("uncut_mpi.bench", parse_bench, "uncut_mpi.bench.job:run_bench", argv, comm)
