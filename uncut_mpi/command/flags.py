"""The flags of commands: their names, values and help; of a schedule the same for every command that plans."""

from __future__ import annotations

import argparse
import dataclasses
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

import uncut_mpi
from uncut_mpi.command.entry import HelpRequested
from uncut_mpi.command.flag_values import (
    MOST_EXTENT,
    MOST_RANKS,
    bytes_of,
    dtype_of,
    grid_of,
    is_number,
    net_of,
    numbers,
    one_of,
    options_of,
    path,
    picture,
    places_of,
    positive,
    scalar,
    whole,
    written,
)
from uncut_mpi.errors import ParamError
from uncut_mpi.model.arguments import BACKENDS, BackendName
from uncut_mpi.model.places import Places
from uncut_mpi.planning import others
from uncut_mpi.planning.metrics import METRICS
from uncut_mpi.planning.option_fields import About, told
from uncut_mpi.planning.options import MOST_TRIED, SEARCHED, Blocking, ScheduleOptions

USUAL_WARMUP: Final = 2
USUAL_REPEAT: Final = 5
"""Calls of a measurement that says nothing else."""

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

_MOST_SAID: Final = 400  # of a message, in characters


_EPILOG: Final = """\
Without files, matrices are generated (uniform in (-1, 1), every mantissa bit random), and alpha and beta are
1.2345 and 1.1154 unless given. With files, alpha is 1, and beta is 1 with -c and 0 without; they are multiplied once,
and timed only with --repeat.

examples:
  mpiexec -n 4 python -m uncut_mpi.gemm
  mpiexec -n 8 python -m uncut_mpi.gemm -m 1000 -n 777 -k 1301 --place 3,h,5 --trans-b T
  mpiexec -n 4 python -m uncut_mpi.gemm A.npy B.npy -c C.npy --beta 0.5 -o OUT.npy
"""


_MOST_USED: Final = (
    "a_path", "b_path", "c_path", "out_path", "m", "n", "k", "dtype", "alpha", "beta", "place", "scheduler", "grid",
    "compute_ranks", "options", "repeat", "overwrite", "json",
)  # fmt: skip
_MOST_USED_OF_PLAN: Final = (
    "m", "n", "k", "dtype", "place", "machine", "ranks", "scheduler", "options", "timeline", "transfers", "json",
)  # fmt: skip


_PLAN_EPILOG: Final = """\
examples:
  python -m uncut_mpi.plan -m 16384 --ranks 4
  python -m uncut_mpi.plan -m 30000 -k 5000 --place 0,0,0 --machine measured.json --timeline plan.html
  python -m uncut_mpi.plan -m 65536 --place rows,cols,rows --machine karolina-8xa100 --nodes 4 --net 25:2:4
"""


def _telling(text_of: Callable[[Any], str]) -> type[argparse.Action]:
    """Return what a flag does that asks for a text, of the parser."""

    class Telling(argparse.Action):
        def __call__(self, parser: argparse.ArgumentParser, *unused: object) -> NoReturn:
            raise HelpRequested(text_of(parser))

    return Telling


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises: on N ranks, one that printed and exited would do so N times."""

    most_used: tuple[str, ...] = ()
    """Names of the arguments that a short help explains; without any there is none."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the values of the words; raise `ParamError` or `HelpRequested`."""
        given = super().parse_args(args, namespace)
        # Some versions of argparse take "--" out of --flag=-- and make an empty list of what is left.
        flag = next((one.option_strings[-1] for one in self._actions if getattr(given, one.dest, None) == []), None)
        if flag is not None:
            self.error(f"argument {flag}: '--' is no value of it")
        return given

    def error(self, message: str) -> NoReturn:
        if len(message) > _MOST_SAID:  # it repeats words of the command line, of any length
            message = f"{message[: _MOST_SAID // 2]}…{message[-_MOST_SAID // 2 :]}"
        raise ParamError(f"{message}; {'--help-all' if self.most_used else '--help'} lists every option")

    def format_short(self) -> str:
        """Return a help that explains the arguments most used and names the others."""
        explained = [action for action in self._actions if action.dest in self.most_used]
        others = [action.option_strings[-1] for action in self._actions if action not in explained]
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, explained, [])
        formatter.add_text(self.description)
        formatter.start_section("what most users need")
        formatter.add_arguments(explained)
        formatter.end_section()
        formatter.start_section("more options, explained by --help-all")
        formatter.add_text(textwrap.fill(" ".join(others), 100, break_on_hyphens=False))
        formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()


_HELP: Final = _telling(_Parser.format_help)


def make_parser() -> argparse.ArgumentParser:
    """Return the gemm command's parser."""
    parser = base_parser(
        "python -m uncut_mpi.gemm",
        "C := alpha op(A) op(B) + beta C on every rank's device, verified, and measured unless it is of files.",
        _EPILOG,
        most_used=_MOST_USED,
    )
    problem = parser.add_argument_group("problem")
    _add_files(problem)
    _add_problem(problem, "default 8192 on GPUs, 1024 on the host backend", files=True)
    machine = parser.add_argument_group("ranks and devices")
    add_machine(machine)
    add = adder(machine)
    add(
        "--machine NAME|FILE",
        path,
        "machine to plan for, of as many ranks: one that ships with the package, a file, or uniform (equal links "
        "and devices); default: what is there, as it was measured",
    )
    add(
        "--host-memory BYTES",
        bytes_of,
        "what each rank may use of host memory for copies of matrices that no device reaches: those in files, or "
        "in private memory that cannot be page-locked. Default: half of what is free, shared by the ranks",
    )
    add_schedule(parser)
    _add_run(parser.add_argument_group("run and report"))
    return parser


def make_plan_parser() -> argparse.ArgumentParser:
    """Return the plan command's parser; the problem and the schedule have the flags of the gemm command."""
    parser = base_parser(
        "python -m uncut_mpi.plan",
        "Chooses a schedule for C := alpha op(A) op(B) + beta C and says what it expects of it; no MPI, no GPU.",
        _PLAN_EPILOG,
        most_used=_MOST_USED_OF_PLAN,
    )
    # What only the gemm command has, and checks of shared flags ask for.
    parser.set_defaults(a_path=None, b_path=None, c_path=None, out_path=None, tune=None)
    _add_problem(parser.add_argument_group("problem"), "default 8192", files=False)
    add = adder(parser.add_argument_group("machine"))
    add(
        "--machine NAME|FILE",
        path,
        "measured machine: one that ships with the package, or a file; default %(default)s, equal links and devices",
        default="uniform",
    )
    add("--ranks N", whole(1, MOST_RANKS), "ranks, with --nodes of each node; default those of the machine, uniform: 4")
    add(
        "--devices D0,D1,…",
        numbers,
        "device of the machine that each rank has, others take no part; default: rank i has device i",
    )
    add(
        "--nodes N",
        whole(1, MOST_RANKS),
        "nodes like this machine, joined by --net; default: it is all there is",
    )
    add(
        "--net GB/S[:µS[:ADAPTERS]]",
        net_of,
        "what joins --nodes: what an adapter sends, and at the same time receives, the time of a message of few bytes "
        "(default 5), adapters of a node (default 1)",
    )
    add(
        "--host-memory BYTES",
        bytes_of,
        "what each rank may use of host memory for copies of matrices in files (f in --place); default: half "
        "of the machine's, shared by the ranks, or as much as they take where that is not known",
    )
    add_schedule(parser)
    group = parser.add_argument_group("search and report")
    text = "say what other places of A, B and C would take, whole and dealt to ranks, the fastest first"
    group.add_argument("--compare-places", action="store_true", help=text)
    add = adder(group)
    add(
        "--timeline FILE",
        picture,
        "write the chosen plan's timeline there: .html (a page to zoom in), .json (ui.perfetto.dev), .png or .txt; "
        "default: nowhere",
    )
    add("--transfers FILE.png", path, "draw its transfers over each link there; default: nowhere")
    add_json(add, "the facts")
    return parser


def base_parser(
    program: str, description: str, epilog: str, *, most_used: tuple[str, ...] = ()
) -> argparse.ArgumentParser:
    """
    Return a parser that raises `ParamError` or `HelpRequested` and never prints or exits.

    Parameters
    ----------
    program, description, epilog : str
        Of its help.
    most_used : tuple of str
        Names of the arguments that ``--help`` explains, where it leaves the rest to ``--help-all``; empty: all of them.
    """
    parser = _Parser(
        prog=program,
        description=f"{description}\nOptions that take no value are off by default.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.most_used = (*most_used, "help", "help_all", "help_schedulers") if most_used else ()
    if most_used:
        parser.add_argument(
            "-h", "--help", action=_telling(_Parser.format_short), nargs=0, help="explain what most users need and end"
        )
        parser.add_argument("--help-all", action=_HELP, nargs=0, help="explain every option and end")
    else:
        parser.add_argument("-h", "--help", action=_HELP, nargs=0, help="show this text and end")
    version = _telling(lambda parser: f"uncut_mpi {uncut_mpi.__version__}\n")
    parser.add_argument("--version", action=version, nargs=0, help="show the version and end")
    return parser


def adder(group: argparse._ArgumentGroup) -> Callable[..., None]:
    """Return what adds a flag with a value, as ``"--json FILE"``: by what reads the value, and what the help says."""

    def add(flag: str, read: Callable[[str], Any], text: str, **more: Any) -> None:
        name, metavar = flag.split(" ")
        group.add_argument(name, type=read, metavar=metavar, help=text, **more)

    return add


def _add_files(group: argparse._ArgumentGroup) -> None:
    group.add_argument("a_path", type=path, nargs="?", metavar="A.npy", help="file of A (with B.npy and -o)")
    group.add_argument("b_path", type=path, nargs="?", metavar="B.npy", help="file of B")
    add = adder(group)
    add("-c C.npy", path, "file of C, read where beta is not 0; default: there is none", dest="c_path")
    add(
        "-o OUT.npy",
        written,
        "file for the result; appears only when complete; default: there is none",
        dest="out_path",
    )


def _add_problem(group: argparse._ArgumentGroup, default_m: str, *, files: bool) -> None:
    own, with_files, without_c = (
        (", or the files' own", ", with files 1", ", or 0 without -c") if files else ("", "", "")
    )
    add = adder(group)
    for name, text in (
        ("m", f"rows of op(A) and C; {default_m}"),
        ("n", "columns of op(B) and C; default M"),
        ("k", "columns of op(A), rows of op(B); default M"),
    ):
        add(f"-{name} {name.upper()}", whole(0, MOST_EXTENT), text)
    add("--dtype f64|f32|tf32|f16|bf16|c64|c128", dtype_of, f"element type; default f64{own}")
    for name in ("a", "b"):
        add(
            f"--trans-{name} N|T|C",
            one_of("N", "T", "C"),
            f"op({name.upper()}), C the conjugate transpose; default %(default)s",
            default="N",
        )
    add("--alpha X", scalar, f"factor of the product, of complex types also as 1+2j; default 1.2345{with_files}")
    add("--beta X", scalar, f"factor of C; default 1.1154{with_files}{without_c}")
    add(
        "--place A,B,C",
        places_of,
        "where A, B and C live: h = host memory that all ranks read, a number = that rank's device, h and a "
        "number = host memory of that rank alone; or how each is dealt to ranks, as rows, cols(3,4), blocks(3,4;5,6) "
        "or replicated, on their devices or with @host or @shared in host memory, and @C for parts stored row-major; "
        f"{'' if files else 'f = a file; '}default %(default)s",
        default=Places.parse("h,h,h"),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankArguments:
    """What `add_machine` has asked of the ranks and their devices, as `Session` takes it."""

    backend: BackendName  # "auto", "cuda" or "host"
    devices: tuple[int, ...] | None  # device ordinal of each rank
    allow_shared_gpu: bool  # let ranks share a GPU
    ranks_per_node: int | None  # take so many ranks of a node for one of their own

    @property
    def of_ranks(self) -> dict[str, Any]:
        """Its fields by their names, which are those of a session's parameters."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(RankArguments)}


def add_machine(group: argparse._ArgumentGroup) -> None:
    """Add the flags that choose the backend and its devices."""
    add = adder(group)
    add(
        f"--backend {'|'.join(BACKENDS)}",
        one_of(*BACKENDS),
        "cuda never falls back, auto takes cuda where every rank can have a GPU, else host; default %(default)s",
        default="auto",
    )
    add("--devices D0,D1,…", numbers, "device of each rank; default: process i of the node takes device i")
    group.add_argument("--allow-shared-gpu", action="store_true", help="let several ranks use one GPU")
    text = "take so many ranks of a node for one that shares nothing with others; default all, or the environment's"
    add("--ranks-per-node R", whole(1), text)


def add_tune_products(group: argparse._ArgumentGroup) -> None:
    """Add the flag that lets a session choose kernels of products."""
    text = "choose kernels of products in f32, tf32, f16 and bf16 by timing what cuBLAS proposes, once a plan"
    group.add_argument("--tune-products", action="store_true", help=text)


def add_json(add: Callable[..., None], what: str) -> None:
    """Add the flag that asks for JSON."""
    text = f"write {what} there too, - is standard output; replaced if it exists; default: nowhere"
    add("--json FILE", written, text)


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
    asked = _telling(lambda parser: schedulers_text())
    parser.add_argument("--help-schedulers", action=asked, nargs=0, help="explain what --options can say and end")


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


def _add_run(group: argparse._ArgumentGroup) -> None:
    add = adder(group)
    add(
        "--tune N",
        whole(0),
        f"try the N schedules predicted best, at most {MOST_TRIED}, in the first calls and keep the fastest; "
        "default: the one predicted best",
    )
    add(
        "--warmup N",
        whole(0),
        f"untimed calls first; default {USUAL_WARMUP}, with files 0 unless --repeat or --tune is given",
    )
    add("--repeat N", whole(1), f"timed calls; default {USUAL_REPEAT}, with files none: one product and no measurement")
    add("--timeout S", positive, "longest time without progress; default %(default)g", default=60.0, dest="timeout_s")
    add_tune_products(group)
    group.add_argument("--no-check", dest="check", action="store_false", help="do not verify the result")
    group.add_argument("--overwrite", action="store_true", help="replace OUT.npy if it exists")
    add_json(add, "the facts of the run")
    add(
        "--trace FILE",
        picture,
        "measure one more call task by task and write its timeline there: .html (a page to zoom in), "
        ".json (ui.perfetto.dev), .png or .txt; default: nowhere",
    )
    add("--seed N", whole(0, MOST_EXTENT), "of random data; default %(default)s", default=0)


def join_negative_values(argv: Sequence[str]) -> list[str]:
    """Return the words with scalars joined to their flags: argparse takes -1e-3 for an option, though not -0.001."""
    joined: list[str] = []
    for word in argv:
        if joined and joined[-1] in ("--alpha", "--beta") and is_number(word, complex):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined
