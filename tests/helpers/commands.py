"""Commands: their parsers, and what runs them within a test, on its own ranks."""

from __future__ import annotations

import io

from tests.helpers.collective import allgather, collective_assert
from uncut_mpi.bench.arguments import make_bench_parser
from uncut_mpi.command.calibrate_arguments import make_calibrate_parser
from uncut_mpi.command.environment import make_env_parser
from uncut_mpi.command.flags import make_parser, make_plan_parser

PARSERS = {
    "gemm": make_parser(),
    "plan": make_plan_parser(),
    "bench": make_bench_parser(),
    "calibrate": make_calibrate_parser(),
    "env": make_env_parser(),
}


class Terminal(io.StringIO):
    """Standard output that is shown on a terminal."""

    def isatty(self) -> bool:
        """It is one."""
        return True


def in_process(main, comm, capfd, always=()):
    """Return what runs a command with some words; it returns (status, everything rank 0 printed, its errors)."""

    def run(words) -> tuple[int, str, str]:
        comm.Barrier()
        capfd.readouterr()
        status = main([*always, *(str(word) for word in words)], comm)
        out, err = capfd.readouterr()
        comm.Barrier()
        statuses = allgather(comm, status)
        outs = allgather(comm, (out, err))
        collective_assert(comm, len(set(statuses)) == 1, f"exit statuses differ: {statuses}")
        collective_assert(comm, not any(o or e for o, e in outs[1:]), f"a rank other than 0 printed: {outs[1:]}")
        return status, outs[0][0], outs[0][1]

    return run
