"""The flags that fix something about a schedule, the same for every command that plans."""

from __future__ import annotations

import argparse
import textwrap
from typing import NoReturn

from uncut_mpi.command.flag_values import bytes_of, grid_of, numbers, one_of, options_of
from uncut_mpi.command.help import HelpRequested
from uncut_mpi.planning import others
from uncut_mpi.planning.metrics import METRICS
from uncut_mpi.planning.option_fields import About, told
from uncut_mpi.planning.options import SEARCHED, Blocking, ScheduleOptions

FLAGS = {
    "scheduler": "--scheduler",
    "metric": "--metric",
    "grid": "--grid",
    "devices": "--compute-ranks",
    "tune": "--tune",
    "device_memory": "--device-memory",
    "host_memory": "--host-memory",
}
"""Options that have flags of their own; all others come by ``--options``."""

_INTRODUCTION = """\
What can be said of a schedule, by --options as JSON or in a file of it:

    --options '{"tile": 2048, "order": "finish"}'
    --options '{"blocking": {"columns": 2, "first": 512}}'

In Python the same names belong to ScheduleOptions and Blocking. What is said stays fixed, the rest is chosen by
simulation, or with --scheduler by that scheduler's own rules. Schedulers that do not take it are left out.
"""


class _HelpSchedulers(argparse.Action):
    """Raises `HelpRequested` with all that can be said of a schedule."""

    def __call__(self, *unused: object) -> NoReturn:
        raise HelpRequested(schedulers_text())


def schedulers_text() -> str:
    """Return the names, kinds, defaults and explanations of all options of schedules."""
    lines = [_INTRODUCTION]
    for prefix, kind in (("", ScheduleOptions), ("blocking.", Blocking)):
        for name, about in told(kind):
            lines += _lines(prefix + name, about)
    return "\n".join(lines) + "\n"


def _lines(name: str, about: About) -> list[str]:
    takers = f"; for {', '.join(about.takers)}" if about.takers else ""
    flag = f"; {FLAGS[name]} says it too" if name in FLAGS else ""
    return [
        f"{name}: {about.what}{takers}{flag}",
        *textwrap.wrap(about.text, 112, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False),
    ]


def add_schedule(parser: argparse.ArgumentParser) -> None:
    """Add the flags that fix something about the schedule."""
    group = parser.add_argument_group(
        "schedule", "What is given stays fixed; the rest is chosen by simulation, or with --scheduler by its own rules."
    )
    group.add_argument(
        "--scheduler",
        metavar="|".join(("auto", *SEARCHED, *others.names())),
        help="auto: whichever simulation finds best; others: that one; default auto",
    )
    group.add_argument(
        "--metric",
        type=one_of(*METRICS),
        metavar="|".join(METRICS),
        help="what the search of auto minimises. "
        + "; ".join(f"{name}: {metric.about}" for name, metric in METRICS.items())
        + ". All but time need a machine file with the devices' power; default time",
    )
    group.add_argument("--grid", type=grid_of, metavar="RxC", help="process grid; default: chosen")
    group.add_argument(
        "--compute-ranks",
        type=numbers,
        metavar="R0,R1,…",
        help="ranks that compute, in the order in which they fill the process grid; the others start too: they hold "
        "what --place puts there, and forward. Default: the search decides, with --scheduler all",
    )
    group.add_argument(
        "--device-memory",
        type=bytes_of,
        metavar="BYTES",
        help="what each rank may use of its device's memory beside the matrices there, as 16GiB or 500MB; a product "
        "that does not fit is computed one block of C after the other. Default: four fifths of what is free, for plan "
        "all",
    )
    group.add_argument(
        "--options",
        type=options_of,
        metavar="JSON|FILE",
        help="more about the schedule, as '{\"tile\": 2048}'; --help-schedulers lists it all; default: nothing",
    )
    parser.add_argument(
        "--help-schedulers", action=_HelpSchedulers, nargs=0, help="explain what --options can say and end"
    )
