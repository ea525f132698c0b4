"""The command line of ``python -m uncut_mpi.gemm``: one frozen value or one error; never prints or exits."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

from uncut_mpi.errors import ParamError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.placement import Placement
from uncut_mpi.planning.options import ORDERS, ROUTINGS, SCHEDULERS, ScheduleOptions

BACKENDS: Final = ("auto", "cuda", "host")

# Scalars that no shortcut of a library or of ours can skip; generated problems use them by default.
GENERATED_ALPHA: Final = 1.2345
GENERATED_BETA: Final = 1.1154

# What --ablation switches by itself, with the flag that would do it by hand.
_ABLATION_FLAGS: Final = {
    "caching": "--no-caching",
    "overlap": "--no-overlap",
    "routing": "--routing",
    "batch": "--no-batch",
    "wr_lazy": "--no-wr-lazy",
    "order": "--order",
}

_EPILOG: Final = """\
Without files, matrices are generated (uniform in (-1, 1), every mantissa bit random), and alpha and beta are
1.2345 and 1.1154 unless given. With files, alpha is 1, and beta is 1 with -c and 0 without.

examples:
  mpiexec -n 4 python -m uncut_mpi.gemm
  mpiexec -n 8 python -m uncut_mpi.gemm -m 1000 -n 777 -k 1301 --place 3,h,5 --trans-b T
  mpiexec -n 4 python -m uncut_mpi.gemm A.npy B.npy -c C.npy --beta 0.5 -o OUT.npy
"""


class HelpRequested(Exception):
    """
    The command line asked for help; carries the text, for one rank to print.

    Attributes
    ----------
    text : str
        The help, ending in a newline.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GemmArguments:
    """
    What one run of the gemm command was asked to do.

    Attributes
    ----------
    m, n, k : int or None
        Extents of generated matrices (elements); all None with files, or where the default for the
        backend is wanted.
    dtype : DType or None
        None: f64 for generated matrices, the files' own type otherwise.
    trans_a, trans_b : str
        ``"N"`` or ``"T"``.
    alpha, beta : float
        Scalars, finite.
    place : Placement
        Where A, B and C live.
    backend : str
        ``"auto"``, ``"cuda"`` or ``"host"``.
    devices : tuple of int or None
        Device ordinal of each rank.
    allow_shared_gpu : bool
        Let ranks share a GPU.
    options : ScheduleOptions
        What is fixed about the schedule.
    ablation : bool
        Run the steps of `ablation_steps` instead of `options` alone.
    warmup, repeat : int
        Untimed and timed calls after the first one.
    timeout_s : float
        A call fails when no task finishes anywhere for so long (seconds).
    check : bool
        Whether the result is verified.
    overwrite : bool
        Whether an existing output file may be replaced.
    json_path : str or None
        Where the facts of the run go as JSON.
    seed : int
        Of generated matrices and of the check's random vectors.
    a_path, b_path, c_path, out_path : str or None
        Matrix files; A, B and OUT are given together or not at all.
    """

    m: int | None
    n: int | None
    k: int | None
    dtype: DType | None
    trans_a: str
    trans_b: str
    alpha: float
    beta: float
    place: Placement
    backend: str
    devices: tuple[int, ...] | None
    allow_shared_gpu: bool
    options: ScheduleOptions
    ablation: bool
    warmup: int
    repeat: int
    timeout_s: float
    check: bool
    overwrite: bool
    json_path: str | None
    seed: int
    a_path: str | None
    b_path: str | None
    c_path: str | None
    out_path: str | None

    @property
    def has_files(self) -> bool:
        """Whether matrices come from files; else they are generated."""
        return self.a_path is not None


def parse(argv: Sequence[str]) -> GemmArguments:
    """
    Return what the command line asks for.

    Looks at no file and at no environment, so every rank gets the same value or the same error.

    Parameters
    ----------
    argv : sequence of str
        Arguments after the program's name.

    Raises
    ------
    ParamError
        If an argument is unknown, malformed, or does not go with another one.
    HelpRequested
        If ``-h`` or ``--help`` is among them.
    """
    given = _parser().parse_args(_join_negative_values(argv))
    _check_files(given)
    m, n, k = _extents(given)
    alpha, beta = _scalars(given)
    options = _options(given)
    return GemmArguments(
        m=m,
        n=n,
        k=k,
        dtype=given.dtype,
        trans_a=given.trans_a,
        trans_b=given.trans_b,
        alpha=alpha,
        beta=beta,
        place=given.place,
        backend=given.backend,
        devices=given.devices,
        allow_shared_gpu=given.allow_shared_gpu,
        options=options,
        ablation=given.ablation,
        warmup=given.warmup,
        repeat=given.repeat,
        timeout_s=given.timeout,
        check=given.check,
        overwrite=given.overwrite,
        json_path=given.json,
        seed=given.seed,
        a_path=given.a,
        b_path=given.b,
        c_path=given.c,
        out_path=given.o,
    )


def ablation_steps(options: ScheduleOptions) -> list[tuple[str, ScheduleOptions]]:
    """
    Return the cumulative steps of the Uncut-GEMMs paper's Fig. 8 as (name, options).

    Parameters
    ----------
    options : ScheduleOptions
        Everything that the steps do not switch (tile, grid, chunks, lanes) is taken from here.
    """
    baseline = dataclasses.replace(
        options, caching=False, overlap=False, routing="origin", batch=False, wr_lazy=False, order="fixed"
    )
    steps = [("baseline", baseline)]
    for name, switched in (
        ("+ caching and overlap", {"caching": True, "overlap": True}),
        ("+ bandwidth routing", {"routing": "bw"}),
        ("+ ETA routing and batching", {"routing": "eta", "batch": True}),
        ("+ WR-lazy and ETA order", {"wr_lazy": True, "order": "eta"}),
    ):
        steps.append((name, dataclasses.replace(steps[-1][1], **switched)))
    return steps


# -- the parser ----------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises: on N ranks, one that printed and exited would do so N times."""

    def error(self, message: str) -> NoReturn:
        raise ParamError(f"{message}; --help lists every option")


class _Help(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *unused: object) -> NoReturn:
        raise HelpRequested(parser.format_help())


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m uncut_mpi.gemm",
        description="C := alpha op(A) op(B) + beta C on every rank's device, measured and verified.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action=_Help, nargs=0, help="show this text and end")
    _add_problem(parser.add_argument_group("problem"))
    _add_machine(parser.add_argument_group("ranks and devices"))
    _add_schedule(parser.add_argument_group("schedule"))
    _add_run(parser.add_argument_group("run and report"))
    return parser


def _add_problem(group: argparse._ArgumentGroup) -> None:
    group.add_argument("a", nargs="?", metavar="A.npy", help="file of A (with B.npy and -o)")
    group.add_argument("b", nargs="?", metavar="B.npy", help="file of B")
    group.add_argument("-c", metavar="C.npy", help="file of C, read where beta is not 0")
    group.add_argument("-o", metavar="OUT.npy", help="file for the result; appears only when complete")
    for name, text in (
        ("m", "rows of op(A) and C"),
        ("n", "columns of op(B) and C; by default m"),
        ("k", "columns of op(A), rows of op(B); by default m"),
    ):
        group.add_argument(f"-{name}", type=_whole(0), metavar=name.upper(), help=text)
    group.add_argument("--dtype", type=_dtype, metavar="f64|f32|f16|bf16", help="element type; f64, or the files' own")
    for name in ("a", "b"):
        group.add_argument(
            f"--trans-{name}", type=_one_of("N", "T"), default="N", metavar="N|T", help=f"op({name.upper()}); default N"
        )
    group.add_argument("--alpha", type=_finite, metavar="X", help="factor of the product")
    group.add_argument("--beta", type=_finite, metavar="X", help="factor of C")
    group.add_argument(
        "--place",
        type=_placement,
        default=Placement.parse("h,h,h"),
        metavar="A,B,C",
        help="where A, B and C live: h = host memory that all ranks read, a number = that rank's device; default h,h,h",
    )


def _add_machine(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--backend",
        type=_one_of(*BACKENDS),
        default="auto",
        metavar="|".join(BACKENDS),
        help="cuda never falls back; auto takes cuda where every rank can have a GPU, else host",
    )
    group.add_argument("--devices", type=_devices, metavar="D0,D1,…", help="device of each rank, in order of ranks")
    group.add_argument("--allow-shared-gpu", action="store_true", help="let several ranks use one GPU")


def _add_schedule(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--scheduler", type=_one_of(*SCHEDULERS), default=SCHEDULERS[0], metavar="|".join(SCHEDULERS))
    group.add_argument("--tile", type=_whole(1), default=0, metavar="T", help="tile edge; chosen if not given")
    group.add_argument("--tile-min", type=_whole(1), default=2048, metavar="T", help="T_min of the tile heuristic")
    group.add_argument("--grid", type=_grid, metavar="RxC", help="process grid; chosen if not given")
    group.add_argument("--chunks", type=_whole(1), default=8, metavar="P", help="chunks of a batched fetch; default 8")
    group.add_argument(
        "--compute-lanes", type=_whole(1), default=8, metavar="L", help="compute lanes per rank; default 8"
    )
    group.add_argument("--no-caching", dest="caching", action="store_false", help="fetch tiles anew each time")
    group.add_argument("--no-overlap", dest="overlap", action="store_false", help="one lane per rank for everything")
    group.add_argument("--routing", type=_one_of(*ROUTINGS), metavar="|".join(ROUTINGS), help="default eta")
    group.add_argument("--no-batch", dest="batch", action="store_false", help="no batched fetch")
    group.add_argument("--no-wr-lazy", dest="wr_lazy", action="store_false", help="always fetch C first")
    group.add_argument(
        "--order", type=_one_of(*ORDERS), metavar="|".join(ORDERS), help="order of sub-problems; default eta"
    )


def _add_run(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--ablation", action="store_true", help="measure the steps of the paper's Fig. 8")
    group.add_argument("--warmup", type=_whole(0), default=2, metavar="N", help="untimed calls first; default 2")
    group.add_argument("--repeat", type=_whole(1), default=5, metavar="N", help="timed calls; default 5")
    group.add_argument(
        "--timeout",
        type=_positive,
        default=60.0,
        metavar="S",
        help="longest time without progress; default 60",
    )
    group.add_argument("--no-check", dest="check", action="store_false", help="do not verify the result")
    group.add_argument("--overwrite", action="store_true", help="replace OUT.npy if it exists")
    group.add_argument("--json", metavar="FILE", help="write the facts of the run there too; replaced if it exists")
    group.add_argument("--seed", type=_whole(0), default=0, metavar="N", help="of random data; default 0")


def _join_negative_values(argv: Sequence[str]) -> list[str]:
    # argparse takes -1e-3 for an option, though it takes -0.001 for a number.
    joined: list[str] = []
    for word in argv:
        if joined and joined[-1] in ("--alpha", "--beta") and _is_number(word):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


# -- values of single options ----------------------------------------------------------------------


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _whole(least: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return value

    return convert


def _finite(text: str) -> float:
    value = float(text) if _is_number(text) else math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return value


def _positive(text: str) -> float:
    value = _finite(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return value


def _one_of(*names: str) -> Callable[[str], str]:
    def convert(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} does not exist: use one of {', '.join(names)}")
        return text

    return convert


def _dtype(text: str) -> DType:
    return DType[_one_of(*DType.__members__)(text)]


def _placement(text: str) -> Placement:
    try:
        return Placement.parse(text)
    except ParamError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _devices(text: str) -> tuple[int, ...]:
    return tuple(_whole(0)(part) for part in text.split(","))


def _grid(text: str) -> tuple[int, int]:
    rows, cross, cols = text.lower().partition("x")
    if not cross:
        raise argparse.ArgumentTypeError(f"{text!r} is not a grid: write rows x columns, as 2x4")
    return _whole(1)(rows), _whole(1)(cols)


# -- what goes with what -----------------------------------------------------------------------------


def _check_files(given: argparse.Namespace) -> None:
    if given.a is None:
        for flag, value in (("-c", given.c), ("-o", given.o)):
            if value is not None:
                raise ParamError(f"{flag} {value} was given without matrix files: name A.npy and B.npy first")
        if given.overwrite:
            raise ParamError("--overwrite was given, but nothing is written without -o: leave it out")
        return
    if given.b is None:
        raise ParamError(f"one matrix file was given ({given.a}): name A.npy and B.npy, or none for generated matrices")
    if given.o is None:
        raise ParamError(f"{given.a} and {given.b} were given without an output: add -o OUT.npy")
    if given.json is not None and given.json == given.o:
        raise ParamError(f"-o and --json both name {given.o}: give them different files")


def _extents(given: argparse.Namespace) -> tuple[int | None, int | None, int | None]:
    named = {f"-{name}": getattr(given, name) for name in "mnk"}
    found = [f"{flag} {value}" for flag, value in named.items() if value is not None]
    if given.a is not None and found:
        raise ParamError(f"{' '.join(found)} was given with matrix files, which say it themselves: leave it out")
    if given.m is None:
        if found:
            raise ParamError(f"{' '.join(found)} was given without -m: add it (n and k are m unless given)")
        return None, None, None
    return given.m, given.m if given.n is None else given.n, given.m if given.k is None else given.k


def _scalars(given: argparse.Namespace) -> tuple[float, float]:
    generated = given.a is None
    alpha = given.alpha if given.alpha is not None else (GENERATED_ALPHA if generated else 1.0)
    if given.beta is not None:
        beta = given.beta
        if beta != 0 and not generated and given.c is None:
            raise ParamError(f"beta = {beta} needs a C to scale, and none was given: add -c C.npy or take --beta 0")
    elif generated:
        beta = GENERATED_BETA
    else:
        beta = 1.0 if given.c is not None else 0.0
    return alpha, beta


def _options(given: argparse.Namespace) -> ScheduleOptions:
    if given.ablation:
        _check_ablation(given)
    chosen: dict[str, Any] = {
        "scheduler": given.scheduler,
        "tile": given.tile,
        "tile_min": given.tile_min,
        "grid": given.grid,
        "chunks": given.chunks,
        "compute_lanes": given.compute_lanes,
        "caching": given.caching,
        "overlap": given.overlap,
        "routing": given.routing or "eta",
        "batch": given.batch,
        "wr_lazy": given.wr_lazy,
        "order": given.order or "eta",
    }
    return ScheduleOptions(**chosen)


def _check_ablation(given: argparse.Namespace) -> None:
    by_hand = [flag for name, flag in _ABLATION_FLAGS.items() if getattr(given, name) not in (True, None)]
    if by_hand:
        raise ParamError(f"{' '.join(by_hand)} was given with --ablation, which sets it itself: leave one of them out")
    if given.a is not None:
        raise ParamError("--ablation was given with matrix files: it measures generated matrices, leave the files out")
