"""What the values of flags may be: from a word of the command line to a number, a type or a place, or why not."""

from __future__ import annotations

import argparse
import cmath
import json
import math
from collections.abc import Callable
from typing import Final, TypeVar

from uncut_mpi.errors import ParamError, reason
from uncut_mpi.model.arguments import MOST_BYTES, Number, bytes_in
from uncut_mpi.model.dtypes import MEASURED, DType
from uncut_mpi.model.places import Places
from uncut_mpi.model.ports import Net
from uncut_mpi.regular import read_regular
from uncut_mpi.view.render import check_suffix

Value = TypeVar("Value")

MOST_COUNT: Final = 2**31 - 1
"""Most of what is counted: calls, blocks, chunks, devices."""

MOST_EXTENT: Final = MOST_BYTES
"""Most of what is measured in elements, bytes or tasks."""

MOST_RANKS: Final = 4096
"""Most ranks of a machine that is planned for, and threads that issue for them."""

_LONGEST_NAME: Final = 4095  # Linux's limit
_MOST_OPTIONS: Final = 1 << 20
_SHOWN: Final = 60


def shown(text: str) -> str:
    """Return a flag's value as a message has it: quoted, and not longer than a line."""
    quoted = repr(text)
    return quoted if len(quoted) <= _SHOWN else f"{quoted[: _SHOWN // 2]}…{quoted[-_SHOWN // 4 :]}"


def is_number(text: str, kind: type[float] | type[complex] = float) -> bool:
    """Return whether a text is a number, with or without a fraction, an exponent or a sign."""
    try:
        kind(text)
    except ValueError:
        return False
    return True


def whole(least: int, most: int = MOST_COUNT) -> Callable[[str], int]:
    """Return what reads a flag's value as a whole number of at least `least` and at most `most`."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            # Python reads no number of more than some thousand digits, of which it can be said all the same.
            value = most + 1 if text.isdecimal() else least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{shown(text)} is not a whole number of at least {least}")
        if value > most:
            raise argparse.ArgumentTypeError(f"{shown(text)} is too large: it is at most {most}")
        return value

    return convert


def _told(read: Callable[..., Value], *texts: str) -> Value:
    """Return what is made of texts, or raise its error as flags have it."""
    try:
        return read(*texts)
    except ParamError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def bytes_of(text: str) -> int:
    """Return the bytes that a flag's value is: a whole number, or a number of kB, MB, GB, TB, KiB, MiB, GiB or TiB."""
    return whole(1, MOST_BYTES)(text) if is_number(text) else _told(bytes_in, shown(text), text)


def finite(text: str) -> float:
    """Return the finite number that a flag's value is."""
    value = float(text) if is_number(text) else math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a finite number")
    if value == 0 and any(int(digit) for digit in text.lower().partition("e")[0] if digit.isdecimal()):
        raise argparse.ArgumentTypeError(f"{shown(text)} is too small: as a number of 64 bits it would be 0")
    return value


def scalar(text: str) -> Number:
    """Return the finite number that a flag's value is, complex if it has an imaginary part as in ``1+2j``."""
    if is_number(text) or not is_number(text, complex):
        return finite(text)
    value = complex(text)
    if not cmath.isfinite(value):
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a finite number")
    return value


def scalar_text(value: Number) -> str:
    """Return a scalar as a user writes it."""
    return f"{value:g}".strip("()")


def scalar_json(value: Number) -> float | str:
    """Return a scalar as JSON knows it: a complex one, which it does not know, as text."""
    return str(value).strip("()") if isinstance(value, complex) else value


def positive(text: str) -> float:
    """Return the finite number above 0 that a flag's value is."""
    value = finite(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not above 0")
    return value


def one_of(*names: str) -> Callable[[str], str]:
    """Return what reads a flag's value as one of some names."""

    def convert(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{shown(text)} does not exist: use one of {', '.join(names)}")
        return text

    return convert


def dtype_of(text: str) -> DType:
    """Return the element type that a flag's value names: one in which matrices are generated and checked."""
    return DType[one_of(*(dtype.name for dtype in MEASURED))(text)]


def places_of(text: str) -> Places:
    """Return where A, B and C live, as a flag's value says it."""
    return _told(Places.parse, text)


def path(text: str) -> str:
    """Return the name of a file that a flag's value is; whether there is one, or could be, is not looked at here."""
    if not text or "\0" in text or len(text) > _LONGEST_NAME:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not the name of a file: no file can have it")
    return text


def written(text: str) -> str:
    """Return the name of a file to be written that a flag's value is; ``-`` is standard output."""
    return "/dev/stdout" if path(text) == "-" else text


def picture(text: str) -> str:
    """Return the name of a file that a timeline can be drawn into."""
    _told(check_suffix, path(text))
    return text


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers, 0 or more each, that a flag's value lists between commas."""
    return tuple(whole(0)(part) for part in text.split(","))


def net_of(text: str) -> Net:
    """Return what joins nodes, of a flag's value: GB/s of an adapter, µs of latency and adapters, as 12.5:2:2."""
    rate, *more = text.split(":")
    if len(more) > 2 or not all(map(is_number, (rate, *more))):
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is no net: write GB/s of an adapter, µs and adapters, 12.5:2:2"
        )
    latency_s = {"latency_s": finite(more[0]) * 1e-6} if more else {}
    adapters = whole(1, MOST_RANKS)(more[1]) if more[1:] else 1
    return _told(lambda: Net(positive(rate), adapters=adapters, **latency_s))


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    names = [name for name, _ in pairs]
    twice = next((name for at, name in enumerate(names) if name in names[:at]), None)
    if twice is not None:
        raise argparse.ArgumentTypeError(f"{shown(twice)} stands there twice: say it once")
    return dict(pairs)


def options_of(text: str) -> dict[str, object]:
    """Return the names and values of a JSON object, which a flag's value is, or the file that it names."""
    where, source = "it", text
    try:
        if not text.lstrip().startswith("{"):
            where, source = shown(path(text)), read_regular(text, _MOST_OPTIONS).decode()
        found = json.loads(source, object_pairs_hook=_once)
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is neither a JSON object, as '{{\"tile\": 2048}}', nor a file: {reason(error)}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{where} is no JSON: {reason(error)}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{where} holds no JSON object: write names and values in braces")
    return found


def grid_of(text: str) -> tuple[int, int]:
    """Return the rows and columns of a grid, as 2x4."""
    rows, cross, cols = text.lower().partition("x")
    if not cross:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a grid: write rows x columns, as 2x4")
    return whole(1)(rows), whole(1)(cols)
