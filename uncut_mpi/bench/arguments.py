"""The command line of ``python -m uncut_mpi.bench``: one frozen value or one error; never prints or exits."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import Any, Final

from uncut_mpi.bench.datasets import DATA, DEALT, SHAPES, Case, layouts, paralia, parsec, uncut_irregular, uncut_regular
from uncut_mpi.bench.processes import BASELINES
from uncut_mpi.bench.rivals.cyclic import DISTRIBUTIONS
from uncut_mpi.bench.rivals.cyclic import VARIANTS as CYCLIC_VARIANTS
from uncut_mpi.command.arguments import check_devices, filled
from uncut_mpi.command.flag_values import MOST_EXTENT, bytes_of, dtype_of, one_of, path, positive, shown, whole, written
from uncut_mpi.command.flags import RankArguments, add_machine, add_tune_products, adder, base_parser
from uncut_mpi.errors import ParamError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.planning.options import MOST_SLOTS, Blocking, ScheduleOptions

DATASETS: Final = {
    "uncut-regular": uncut_regular,
    "uncut-irregular": uncut_irregular,
    "paralia": paralia,
    "layouts": layouts,
    "parsec": parsec,
}
STEPS: Final = ("baseline", "caching", "bandwidth", "eta")
"""The paper's Fig. 8 but for its last step, which is ``"uncut"``."""

METHODS: Final = ("auto", "tuned", "uncut", "kblocks", "cyclic", "bands", "parsec", "cubes", "one", *STEPS, *BASELINES)
TILED: Final = ("uncut", "cyclic", "bands", "parsec")
"""Methods that take a tile, as ``"uncut:2048"``."""

TRIED: Final = 8
"""Schedules that the method ``"tuned"`` tries."""

_LONGEST: Final = 2**28
"""Longest extent of a problem (elements): three square matrices of it can still be addressed."""

_EPILOG: Final = f"""\
Every problem is made once and multiplied by every method in turn: two calls, of which the first one plans, warm-up
calls for half the time cap at most, and timed ones, --repeat or as many as the cap allows, at least 3; before them
come the calls in which tuned tries schedules. With --rounds N that happens N times, all methods in each and every
other time backwards, with an N-th of the timed calls, rounded up, and of the cap. Settings and schedules stay those of
the first round, and the last one verifies. One sample is
the slowest rank between two barriers. Calls go on for half a second in all where GPUs tell their energy, whose
counter is slow. No method keeps tiles from one call to the next, so there is no cache to flush. Data are random with
every bit of the mantissa in use, alpha is 1.2345, beta 1.1154; results are verified. Problems for which memory is too
small are named and left out, and tried again by the next run, as are wrong results.

methods:
  auto      the schedule that a search by simulation chooses (what the library does by default)
  tuned     the fastest of the {TRIED} schedules that it expects most of, tried beforehand
  uncut     the scheduler of the Uncut-GEMMs paper with its heuristics
  kblocks   few large products per rank, without a search
  cyclic    PARALiA's scheduler: tiles dealt out to the devices that its model chooses for the least time, its
            select(PERF); cyclic:edp and cyclic:pdp are its select(EDP) and select(PDP), where watts are known
  cyclic:comm-opt   the same without that choice: all devices, in equal shares
  bands     Choi's scheduler, between devices only, with A stored transposed as its authors keep it
  parsec    the out-of-core scheduler of the PaRSEC paper: C in blocks, A and B in k-blocks, whatever has room
  cubes     what the Uncut-GEMMs paper does where memory is short: cubes one after the other, each by uncut
  uncut:T, cyclic:T, bands:T, parsec:T   the same with tiles of T, for a sweep of tiles
  parsec+L, parsec:T+L   parsec that fetches L k-blocks ahead
  cyclic:D  with tiles dealt out otherwise: D is {", ".join(DISTRIBUTIONS)}
  one       one device alone does it all, its BLAS on large blocks; it fetches what is elsewhere
  baseline, caching, bandwidth, eta   the steps of the paper's Fig. 8 up to uncut, each with the ones before
other libraries, each in a process of its own with the same devices and data, at its best setting, which is recorded:
  cublas    one GPU: what is elsewhere is copied there, multiplied by one call and copied back
  cublasxt  cuBLASXt, the edge of its blocks swept
  jax       JAX: a product sharded in rows, columns, blocks and parts of k
  torch     PyTorch: scattered, multiplied and gathered, shared in the same ways
  numpy     NumPy with its BLAS on all cores (host backend); scipy: the same of SciPy's BLAS
  dtensor   PyTorch's DTensor, a process for each rank; of dealt matrices, as the next two
  cublasmp  cuBLASMp through nvmath-python, a process for each GPU
  pdgemm    ScaLAPACK, a process for each rank (host backend)
  floor     no library: every device multiplies an equal share of what is there already, all at once
Matrices that a library does not take as they are dealt (dataset layouts) it moves first, and back: the summary marks
that with *. With floor among the methods the summary has a table of all methods for each problem.

examples:
  mpiexec -n 8 python -m uncut_mpi.bench --dataset uncut-irregular --sample 60 --output irregular.jsonl
  mpiexec -n 4 python -m uncut_mpi.bench --compute 1,2,4 --methods auto,one --output scaling.jsonl --plot scaling.png
  mpiexec -n 4 python -m uncut_mpi.bench --methods auto,cublas,cublasxt,jax,torch --output others.jsonl
  mpiexec -n 2 python -m uncut_mpi.bench --dataset layouts --only slabs --methods auto,cublasmp,dtensor,jax,floor
"""


_MOST_NAMED: Final = 12
"""Extents that an error names."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BenchArguments(RankArguments):
    """
    What one run of the bench command was asked to do.

    Attributes
    ----------
    dataset : str
        One of `DATASETS`.
    only : tuple of str
        Of `SHAPES`, `DATA` and `DEALT`, and extents as ``"4096"`` or ``"4096x4096x65536"``. Problems are those of a
        shape, of extents, of data and dealt as one named says; all where none of a kind is named.
    sample : int or None
        How many of these problems, spread evenly; None: all.
    scale : float or None
        Factor of every extent; None: 1 with GPUs, 1/32 without.
    dtypes : tuple of DType
        Types, each with all problems.
    methods : tuple of str
        Of `METHODS`, or of `TILED` with ``":T"``, or ``"cyclic:"`` and one of its variants, in the order of
        measurement; speedups are those of the first. ``"parsec"`` may end in ``"+L"``: it fetches L k-blocks ahead.
    compute : tuple of int or None
        How many ranks compute, one measurement each; None: all.
    warmup, repeat : int
        Calls before, in every round, and timed calls at most, in all rounds: divided by them and rounded up.
    rounds : int
        Into how many rounds, with all methods in each, the timed calls are divided.
    time_cap_s : float
        Time for a method's timed calls, in all rounds.
    time_limit_s : float or None
        After so long no more problems begin; None: all do.
    tune_products : bool
        As `Session` takes it.
    device_memory : int or None
        As `Session` takes it.
    check : bool
        Whether results are verified.
    output : str
        File of the results, a line of JSON each; those that are there already are not measured again.
    plot : str or None
        Picture of the rates.
    seed : int
        Of the random data.
    """

    dataset: str
    only: tuple[str, ...]
    sample: int | None
    scale: float | None
    dtypes: tuple[DType, ...]
    methods: tuple[str, ...]
    compute: tuple[int, ...] | None
    warmup: int
    repeat: int
    rounds: int
    time_cap_s: float
    time_limit_s: float | None
    tune_products: bool
    device_memory: int | None
    check: bool
    output: str
    plot: str | None
    seed: int


def parse_bench(argv: Sequence[str]) -> BenchArguments:
    """
    Return what the command line asks for.

    Looks at no file and at no environment, so every rank gets the same value or the same error.

    Raises
    ------
    ParamError
        If an argument is unknown, malformed, or does not go with another one.
    HelpRequested
        If ``-h`` or ``--help`` is among them.
    """
    given = make_bench_parser().parse_args(list(argv))
    check_devices(given)
    if not _subset(given.dataset, given.only):
        extents = dict.fromkeys("×".join(map(str, case[:3])) for case in DATASETS[given.dataset]())
        some = ", ".join(itertools.islice(extents, _MOST_NAMED)) + (", …" if len(extents) > _MOST_NAMED else "")
        raise ParamError(
            f"--only {','.join(given.only)}: the dataset {given.dataset} has no such problem; ask for other shapes, "
            f"other places or another --dataset. Its extents, before --scale, are {some}"
        )
    _check_scale(given)
    return filled(BenchArguments, given)


def _check_scale(given: argparse.Namespace) -> None:
    """Refuse a scale with which a matrix could not be addressed."""
    longest = max(max(case.m, case.n, case.k) for case in DATASETS[given.dataset]())
    if given.scale is not None and not longest * given.scale <= _LONGEST:
        raise ParamError(
            f"--scale {given.scale:g}: extents of {given.dataset}, up to {longest}, would be above {_LONGEST}; "
            "take a smaller one"
        )


def make_bench_parser() -> argparse.ArgumentParser:
    """Return the bench command's parser."""
    parser = base_parser(
        "python -m uncut_mpi.bench", "Measures the papers' problems with several methods and sums them up.", _EPILOG
    )
    add = adder(parser.add_argument_group("problems"))
    add(
        f"--dataset {'|'.join(DATASETS)}",
        one_of(*DATASETS),
        "whose problems; default %(default)s",
        default="uncut-regular",
    )
    add(
        "--only NAME0,NAME1,…",
        _kinds,
        f"the problems of these shapes ({', '.join(SHAPES)}) or extents (4096 or 4096x4096x65536) with data at "
        f"these places ({', '.join(DATA)}), dealt so ({', '.join(DEALT)}); default all",
        default=(),
    )
    add("--sample N", whole(1), "so many of these problems, spread evenly; default all")
    add("--scale X", positive, "factor of every extent; default 1 with GPUs, 0.03125 without")
    add("--dtypes T0,T1,…", _dtypes, "f64, f32, tf32, f16, bf16, c64, c128; default f64", default=(DType.f64,))
    add("--seed N", whole(0, MOST_EXTENT), "of random data; default %(default)s", default=0)
    add = adder(parser.add_argument_group("methods"))
    add("--methods M0,M1,…", _methods, "see below; default auto,uncut,one", default=("auto", "uncut", "one"))
    add("--compute G0,G1,…", _counts, "how many ranks compute, for strong scaling; default all")
    add_machine(parser.add_argument_group("ranks and devices"))
    run = parser.add_argument_group("run and report")
    add = adder(run)
    add("--warmup N", whole(0), "untimed calls first; default %(default)s", default=10)
    add("--repeat N", whole(1), "timed calls at most; default %(default)s", default=100)
    add(
        "--rounds N",
        whole(1),
        "divide them into rounds, each with all methods and every other one backwards, so that a clock that "
        "sinks meets them all alike; default %(default)s",
        default=1,
    )
    add(
        "--time-cap S",
        positive,
        "time for the timed calls of a method; default %(default)g",
        default=2.0,
        dest="time_cap_s",
    )
    add(
        "--time-limit S",
        positive,
        "begin no more problems after so long, and leave them to the next run; default: all begin",
        dest="time_limit_s",
    )
    add_tune_products(run)
    add(
        "--device-memory BYTES",
        bytes_of,
        "what each rank may use of its device's memory beside the matrices there, as 16GiB; default: four fifths "
        "of what is free",
    )
    run.add_argument("--no-check", dest="check", action="store_false", help="do not verify results")
    add(
        "--output FILE",
        written,
        "add results there and go on where it ends; default %(default)s",
        default="bench.jsonl",
    )
    add("--plot FILE.png", _png, "draw the rates there; default: nowhere")
    return parser


def cases_of(arguments: BenchArguments, num_ranks: int, scale: float) -> list[Case]:
    """
    Return the problems: the dataset's own or some of them, scaled, their ranks folded onto those there are.

    Extents are multiples of 16 and at least 16; ranks count modulo `num_ranks`. Problems that are the same then
    come once.
    """
    cases = _subset(arguments.dataset, arguments.only)
    if arguments.sample is not None and arguments.sample < len(cases):
        cases = [cases[number * len(cases) // arguments.sample] for number in range(arguments.sample)]
    found = []
    for case in cases:
        m, n, k = (max(16, round(extent * scale / 16) * 16) for extent in (case.m, case.n, case.k))
        places = (str(int(place) % num_ranks) if place.isdigit() else place for place in case.placement.split(","))
        found.append(Case(m, n, k, ",".join(places)))
    return list(dict.fromkeys(found))


_ADDED: Final[tuple[dict[str, Any], ...]] = (
    {"caching": True, "overlap": True},
    {"routing": "bw"},
    {"routing": "eta", "batch": True},
    {"wr_lazy": True, "order": "eta"},
)
"""What each step after the baseline switches on besides; relays come with the first routing that has a choice."""


def ablation_options(base: ScheduleOptions | None = None) -> list[ScheduleOptions]:
    """Return the paper's Fig. 8, `STEPS` and ``"uncut"``; all that the steps do not switch is taken from `base`."""
    off = {"caching": False, "overlap": False, "routing": "origin", "batch": False, "wr_lazy": False, "order": "fixed"}
    baseline = dataclasses.replace(base or ScheduleOptions(), scheduler="uncut", **off)  # type: ignore[arg-type]
    return [*itertools.accumulate(_ADDED, lambda one, added: dataclasses.replace(one, **added), initial=baseline)]


def options_of(method: str, devices: tuple[int, ...] | None) -> ScheduleOptions:
    """Return the options of a method's schedules on some ranks, None: all."""
    if method in STEPS:
        return ablation_options(ScheduleOptions(devices=devices))[STEPS.index(method)]
    method, _, ahead = method.partition("+")
    name, _, how = method.partition(":")
    scheduler = {"one": "auto", "tuned": "auto", "cubes": "uncut"}.get(name, name)
    options = ScheduleOptions(scheduler=scheduler, devices=devices, tune=TRIED if name == "tuned" else 0)
    if how and not how.isdigit():
        return dataclasses.replace(options, scheduler=method)
    if ahead:
        options = dataclasses.replace(options, blocking=Blocking(slots=int(ahead) + 1))
    return dataclasses.replace(options, tile=int(how or 0))


def _words(text: str) -> list[str]:
    words = text.split(",")
    if len(set(words)) < len(words):
        raise argparse.ArgumentTypeError(f"{shown(text)} names something twice")
    return words


def _png(text: str) -> str:
    if not path(text).endswith(".png"):
        raise argparse.ArgumentTypeError(f"{shown(text)} does not end in .png")
    return text


def _dtypes(text: str) -> tuple[DType, ...]:
    return tuple(dtype_of(word) for word in _words(text))


def _methods(text: str) -> tuple[str, ...]:
    for word in _words(text):
        method, plus, ahead = word.partition("+")
        name, colon, how = method.partition(":")
        if plus and name == "parsec":
            _lookahead(ahead)
        elif plus:
            one_of(*METHODS)(word)
        if colon and name == "cyclic" and not how.isdigit():
            one_of(*CYCLIC_VARIANTS)(how)
        elif colon and name in TILED:
            whole(1, MOST_EXTENT)(how)
        else:
            one_of(*METHODS)(method)
    return tuple(_words(text))


_lookahead: Final = whole(0, MOST_SLOTS - 1)


def _subset(dataset: str, only: Sequence[str]) -> list[Case]:
    shapes = set(only).intersection(SHAPES) or SHAPES
    data = set(only).intersection(DATA) or DATA
    dealt = set(only).intersection(DEALT) or DEALT
    extents = {tuple(map(int, word.split("x"))) for word in only if word[0].isdigit()}
    return [
        case
        for case in DATASETS[dataset]()
        if case.shape in shapes and case.data in data and case.dealt in dealt
        if not extents or case[:3] in extents or (case.m == case.n == case.k and (case.m,) in extents)
    ]


def _kinds(text: str) -> tuple[str, ...]:
    for word in _words(text):
        if not re.fullmatch(r"[0-9]{1,9}(x[0-9]{1,9}){0,2}", word) or word.count("x") == 1:
            one_of(*SHAPES, *DATA, *DEALT)(word)
    return tuple(_words(text))


def _counts(text: str) -> tuple[int, ...]:
    return tuple(whole(1)(word) for word in _words(text))
