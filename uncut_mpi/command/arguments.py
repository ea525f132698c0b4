"""The command line of ``python -m uncut_mpi.gemm``: one frozen value or one error; never prints or exits."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final

from uncut_mpi.command.artifacts import written_by
from uncut_mpi.command.entry import Arguments
from uncut_mpi.command.flag_values import scalar_text
from uncut_mpi.command.flags import FLAGS, USUAL_REPEAT, USUAL_WARMUP, RankArguments, join_negative_values, make_parser
from uncut_mpi.errors import ParamError
from uncut_mpi.model.arguments import Number
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.places import Places
from uncut_mpi.model.problem import Trans
from uncut_mpi.planning.options import MOST_TRIED, ScheduleOptions

# Scalars that no shortcut of a library or of ours can skip; generated problems use them by default.
GENERATED_ALPHA: Final = 1.2345
GENERATED_BETA: Final = 1.1154


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GemmArguments(RankArguments):
    """
    What one run of the gemm command was asked to do, as the help of its flags says.

    m, n and k are all None with files, or where the default for the backend is wanted. No type is f64 of generated
    matrices, and their own one of files. There are no timed calls where a product is wanted and no measurement.
    """

    m: int | None
    n: int | None
    k: int | None
    dtype: DType | None
    trans_a: Trans
    trans_b: Trans
    alpha: Number
    beta: Number
    place: Places
    machine: str | None
    options: ScheduleOptions
    warmup: int
    repeat: int
    timeout_s: float
    tune_products: bool
    check: bool
    overwrite: bool
    json: str | None
    trace: str | None
    seed: int
    a_path: str | None
    b_path: str | None
    c_path: str | None
    out_path: str | None


def parse(argv: Sequence[str]) -> GemmArguments:
    """
    Return what the command line asks for.

    Looks at no environment, and at no file but that of ``--options``: every rank gets the same, or all are told.

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
    given = make_parser().parse_args(join_negative_values(argv))
    _check_files(given)
    check_devices(given)
    check_different({"-o": given.out_path, **written_by(given)})
    if any(given.place.in_files):
        raise ParamError("f in --place is for the plan command: name the files themselves, A.npy B.npy -o OUT.npy")
    complete(given)
    # Files are there to be multiplied, generated matrices to be measured.
    measured = given.a_path is None or given.options.tune > 1 or (given.warmup, given.repeat) != (None, None)
    if given.warmup is None:
        given.warmup = USUAL_WARMUP if measured else 0
    if given.repeat is None:
        given.repeat = USUAL_REPEAT if measured else 0
    return filled(GemmArguments, given)


def complete(given: argparse.Namespace) -> None:
    """Put in what follows of flags that were not given: extents, scalars and what is fixed about the schedule."""
    _complete_extents(given)
    _complete_scalars(given)
    given.options = _options_of(given)


def filled(kind: type[Arguments], given: argparse.Namespace) -> Arguments:
    """Return the arguments of a command, each of the name that it has among the values of flags."""
    return kind(**{field.name: getattr(given, field.name) for field in dataclasses.fields(kind)})  # type: ignore[arg-type]


def dest_of(flag: str) -> str:
    """Return the name by which a command line's values have that of a flag."""
    return flag.strip("-").replace("-", "_")


def check_devices(given: argparse.Namespace) -> None:
    """Refuse flags of GPUs with the host backend."""
    if given.backend != "host":
        return
    for flag in ("--devices", "--allow-shared-gpu", "--tune-products"):
        if getattr(given, dest_of(flag), None):  # not every command has all of them
            raise ParamError(f"{flag} was given with --backend host, which has no GPUs: leave one of them out")


def _check_files(given: argparse.Namespace) -> None:
    if given.overwrite and given.out_path is None:
        raise ParamError("--overwrite was given, but nothing is written without -o: leave it out")
    if given.a_path is None:
        for flag, value in (("-c", given.c_path), ("-o", given.out_path)):
            if value is not None:
                raise ParamError(f"{flag} {value} was given without matrix files: name A.npy and B.npy first")
    elif given.b_path is None:
        raise ParamError(
            f"one matrix file was given ({given.a_path}): name A.npy and B.npy, or none for generated matrices"
        )


def check_different(written: Mapping[str, str | None]) -> None:
    """Refuse one name for the files of two flags."""
    named = [(flag, path) for flag, path in written.items() if path is not None]
    for (first, path), (second, other) in itertools.combinations(named, 2):
        if path == other:
            raise ParamError(f"{first} and {second} both name {path}: give them different files")


def _complete_extents(given: argparse.Namespace) -> None:
    """Let n and k be m unless given."""
    named = {f"-{name}": getattr(given, name) for name in "mnk"}
    found = [f"{flag} {value}" for flag, value in named.items() if value is not None]
    if given.a_path is not None and found:
        raise ParamError(f"{' '.join(found)} was given with matrix files, which say it themselves: leave it out")
    if given.m is None and found:
        raise ParamError(f"{' '.join(found)} was given without -m: add it (n and k are m unless given)")
    given.n, given.k = (given.m if extent is None else extent for extent in (given.n, given.k))


def _complete_scalars(given: argparse.Namespace) -> None:
    """Put in alpha and beta, by default those for generated matrices or for files."""
    generated, has_c = given.a_path is None, given.c_path is not None
    if given.alpha is None:
        given.alpha = GENERATED_ALPHA if generated else 1.0
    if given.beta is None:
        given.beta = GENERATED_BETA if generated else float(has_c)
    elif given.beta != 0 and not (generated or has_c):
        raise ParamError(f"beta = {given.beta} needs a C to scale, and none was given: add -c C.npy or take --beta 0")
    dtype = given.dtype or (DType.f64 if generated else DType.c128)  # files say theirs later
    for flag, value in (("--alpha", given.alpha), ("--beta", given.beta)):
        if isinstance(value, complex) and not dtype.is_complex:
            raise ParamError(
                f"{flag} {scalar_text(value)} is complex, and the matrices are {dtype.name}: add --dtype c128, or give "
                "a real number"
            )


def _options_of(given: argparse.Namespace) -> ScheduleOptions:
    """Return what is fixed about the schedule."""
    chosen: dict[str, Any] = dict(given.options or {})
    flags = {name: getattr(given, dest_of(flag)) for name, flag in FLAGS.items()}
    for name, value in flags.items():
        if value is None:
            continue
        if name in chosen:
            raise ParamError(f"{FLAGS[name]} and {name} in --options say the same: leave one of them out")
        chosen[name] = value
    chosen.setdefault("scheduler", "auto")
    _check_searched(given, chosen["scheduler"])
    options = ScheduleOptions.decoded(chosen, "--options")
    _check_taken(options)
    return options


def _check_taken(options: ScheduleOptions) -> None:
    """Refuse what the scheduler, or every scheduler, does not take."""
    if options.scheduler == "auto":
        try:
            options.schedulers()
        except ParamError:
            names = ", ".join(FLAGS.get(name, name) for name in options.given)
            raise ParamError(f"no scheduler takes all of {names}: leave some of them out") from None
    elif foreign := options.foreign(options.scheduler):
        names = ", ".join(FLAGS.get(name, name) for name in foreign)
        raise ParamError(
            f"{names} with --scheduler {options.scheduler}, which does not take that: leave out one or the other"
        )


def _check_searched(given: argparse.Namespace, scheduler: object) -> None:
    tune, metric = given.tune or 0, given.metric or "time"
    if tune > MOST_TRIED:
        raise ParamError(f"--tune {tune}: at most {MOST_TRIED} schedules are tried")
    other = f"--scheduler {scheduler}"
    if tune > 1 and scheduler != "auto":
        raise ParamError(f"--tune with {other}: it tries schedules that a search finds; leave out one or the other")
    if metric != "time" and scheduler != "auto":
        raise ParamError(f"--metric with {other}: a search minimises it; leave out one or the other")
    if metric != "time" and tune > 1:
        raise ParamError("--metric with --tune, which keeps the fastest of what it tries: leave one of them out")
