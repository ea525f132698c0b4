"""What commands there are: ``python -m uncut_mpi``, or ``uncut-mpi``; and any of them by its name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Final

import uncut_mpi
from uncut_mpi.command import streams
from uncut_mpi.command.entry import conclude
from uncut_mpi.errors import ParamError
from uncut_mpi.spmd.launcher import rank_of_process

COMMANDS: Final = {
    "gemm": "multiply generated matrices or files on all ranks, verified",
    "plan": "choose a schedule and say what it would take; one process, no MPI, no GPU",
    "bench": "measure the papers' problems with several methods on all ranks",
    "calibrate": "measure this machine on all ranks, once, so that plans are made for it",
    "env": "say which versions, devices, limits and settings there are, for a bug report",
}

_LISTED: Final = "\n".join(f"  {name:<10} {about}" for name, about in COMMANDS.items())
_USAGE: Final = f"""\
usage: python -m uncut_mpi COMMAND [options], or uncut-mpi COMMAND [options]

Multi-GPU matrix multiplication under MPI, one rank per GPU.

commands (python -m uncut_mpi.COMMAND is the same):
{_LISTED}

What works on all ranks is started by mpiexec, or srun; COMMAND --help says more:
  mpiexec -n 4 python -m uncut_mpi gemm
  mpiexec -n 4 python -m uncut_mpi gemm A.npy B.npy -o OUT.npy
  mpiexec -n 4 python -m uncut_mpi calibrate
  python -m uncut_mpi plan -m 16384 --ranks 4
"""


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run the command that the first word names and return its exit status; without one, say what there is.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments; those of the process by default.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in COMMANDS:
        status: int = importlib.import_module(f"uncut_mpi.{words[0]}").main(words[1:])
        return status
    streams.guard()
    first = rank_of_process() == 0  # nothing needs MPI here, which would tell
    if not words or words[0] in ("-h", "--help"):
        return conclude("uncut_mpi", [_USAGE] if first else [])
    if words[0] == "--version":
        return conclude("uncut_mpi", [f"uncut_mpi {uncut_mpi.__version__}\n"] if first else [])
    error = ParamError(f"there is no command {words[0]!r}: use one of {', '.join(COMMANDS)}, or --help")
    return conclude("uncut_mpi", [], error) if first else 2


if __name__ == "__main__":
    sys.exit(main())
