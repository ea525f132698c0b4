"""The flags that fix something about a schedule, the same for every command that plans."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable
from typing import Any

from uncut_mpi.command.flag_values import bytes_of, grid_of, numbers, one_of, options_of
from uncut_mpi.command.help import telling
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


def schedulers_text() -> str:
    """Return the names, kinds, defaults and explanations of all options of schedules."""
    lines = [_INTRODUCTION]
    for prefix, kind in (("", ScheduleOptions), ("blocking.", Blocking)):
        for name, about, text in told(kind):
            lines += _lines(prefix + name, about, text)
    return "\n".join(lines) + "\n"


def _lines(name: str, about: About, text: str) -> list[str]:
    takers = f"; for {', '.join(about.takers)}" if about.takers else ""
    flag = f"; {FLAGS[name]} says it too" if name in FLAGS else ""
    return [
        f"{name}: {about.what}{takers}{flag}",
        *textwrap.wrap(text, 112, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False),
    ]


def adder(group: argparse._ArgumentGroup) -> Callable[..., None]:
    """Return what adds a flag with a value, as ``"--json FILE"``: by what reads the value, and what the help says."""

    def add(flag: str, read: Callable[[str], Any], text: str, **more: Any) -> None:
        name, metavar = flag.split(" ")
        group.add_argument(name, type=read, metavar=metavar, help=text, **more)

    return add


def add_schedule(parser: argparse.ArgumentParser) -> None:
    """Add the flags that fix something about the schedule."""
    group = parser.add_argument_group(
        "schedule", "What is given stays fixed; the rest is chosen by simulation, or with --scheduler by its own rules."
    )
    add = adder(group)
    group.add_argument(
        "--scheduler",
        metavar="|".join(("auto", *SEARCHED, *others.names())),
        help="auto: whichever simulation finds best; others: that one; default auto",
    )
    add(
        f"--metric {'|'.join(METRICS)}",
        one_of(*METRICS),
        "what the search of auto minimises. "
        + "; ".join(f"{name}: {metric.about}" for name, metric in METRICS.items())
        + ". All but time need a machine file with the devices' power; default time",
    )
    add("--grid RxC", grid_of, "process grid; default: chosen")
    add(
        "--compute-ranks R0,R1,…",
        numbers,
        "ranks that compute, in the order in which they fill the process grid; the others start too: they hold "
        "what --place puts there, and forward. Default: the search decides, with --scheduler all",
    )
    add(
        "--device-memory BYTES",
        bytes_of,
        "what each rank may use of its device's memory beside the matrices there, as 16GiB or 500MB; a product "
        "that does not fit is computed one block of C after the other. Default: four fifths of what is free, for plan "
        "all",
    )
    add(
        "--options JSON|FILE",
        options_of,
        "more about the schedule, as '{\"tile\": 2048}'; --help-schedulers lists it all; default: nothing",
    )
    asked = telling(lambda parser: schedulers_text())
    parser.add_argument("--help-schedulers", action=asked, nargs=0, help="explain what --options can say and end")
