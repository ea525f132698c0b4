"""The command line of ``python -m uncut_mpi.calibrate``: one frozen value or one error; never prints or exits."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Final

from uncut_mpi.command.arguments import check_devices, check_different, filled
from uncut_mpi.command.artifacts import written_by
from uncut_mpi.command.flag_values import path, positive, written
from uncut_mpi.command.flags import RankArguments, add_json, add_machine, adder, base_parser
from uncut_mpi.errors import ParamError

DEFAULT_TIME_LIMIT_S: Final = 45.0

_EPILOG: Final = """\
Every probe is repeated until the 95 % confidence interval of its mean is within 5 % of the mean, at least 10 times. The
result is the machine that sessions on the same hardware plan with; it replaces the quick one that the first session
measures. Of several nodes each is measured, and then the net between them. The exit status is 0 only if no word was
wrong in the litmus.

examples:
  mpiexec -n 4 python -m uncut_mpi.calibrate
  mpiexec -n 4 python -m uncut_mpi.calibrate --quick
  mpiexec -n 4 python -m uncut_mpi.calibrate --disk /data --output node7.json
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateArguments(RankArguments):
    """What one run of the calibrate command was asked to do, as the help of its flags says."""

    quick: bool
    time_limit_s: float
    disk: str | None
    output: str | None
    json: str | None


def parse_calibrate(argv: Sequence[str]) -> CalibrateArguments:
    """
    Return what the command line asks for; errors as of `uncut_mpi.command.arguments.parse`.

    Looks at no file and at no environment, so every rank gets the same value or the same error.
    """
    given = make_calibrate_parser().parse_args(list(argv))
    check_devices(given)
    check_different(written_by(given))
    if given.time_limit_s is None:
        given.time_limit_s = DEFAULT_TIME_LIMIT_S
    elif given.quick:
        raise ParamError(f"--time-limit {given.time_limit_s:g} was given with --quick, which has none: leave one out")
    return filled(CalibrateArguments, given)


def make_calibrate_parser() -> argparse.ArgumentParser:
    """Return the calibrate command's parser."""
    parser = base_parser(
        "python -m uncut_mpi.calibrate", "Measures this machine, prints it and keeps it for later sessions.", _EPILOG
    )
    add_machine(parser.add_argument_group("ranks and devices"))
    run = parser.add_argument_group("run and report")
    add = adder(run)
    run.add_argument("--quick", action="store_true", help="one transfer per link and one product per type, under 5 s")
    add(
        "--time-limit S",
        positive,
        f"after so long probes are repeated 3 times only and pairs of links left out; default {DEFAULT_TIME_LIMIT_S:g}",
        dest="time_limit_s",
    )
    add(
        "--disk FOLDER",
        path,
        "measure the disk of that folder too, with a file of 2 GiB: for products of matrices in files; default: a "
        "common disk is assumed",
    )
    add("--output FILE", written, "keep the machine there, - is standard output; default: where sessions look for it")
    add_json(add, "the machine file")
    return parser
