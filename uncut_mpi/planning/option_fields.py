"""
Options that are declared once, as fields of a dataclass whose documentation explains them.

Converting, checks, who takes an option, command lines and help follow from that: a new option is its field, its
explanation and what uses it.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from uncut_mpi.errors import ParamError
from uncut_mpi.model.arguments import byte_count, count, flag, items, real_number, shown, type_text, word

_MOST: Final = 1 << 62
_ABOUT: Final = "about"


def _counts(name: str, value: object) -> tuple[int, ...]:
    return tuple(count(f"{name}[{at}]", one) for at, one in enumerate(items(name, value)))


def _numbers(name: str, value: object) -> tuple[float, ...]:
    return tuple(real_number(f"{name}[{at}]", one) for at, one in enumerate(items(name, value)))


def _columns(name: str, value: object) -> tuple[tuple[float, ...], ...]:
    return tuple(_numbers(f"{name}[{at}]", one) for at, one in enumerate(items(name, value)))


@dataclasses.dataclass(frozen=True, slots=True)
class OptionKind:
    """
    What an option is.

    Attributes
    ----------
    text : str
        In words, for help.
    convert : callable
        Makes Python's own value of a caller's; `ParamError` for anything else.
    """

    text: str
    convert: Callable[[str, object], Any]


NUMBER: Final = OptionKind("int", count)
BYTES: Final = OptionKind('int or str, as "16GiB"', byte_count)
SWITCH: Final = OptionKind("bool", flag)
WORD: Final = OptionKind("str", word)
COUNTS: Final = OptionKind("tuple of int", _counts)
NUMBERS: Final = OptionKind("tuple of float", _numbers)
COLUMNS: Final = OptionKind("tuple of tuple of float", _columns)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """
    What there is to know about an option besides its name and its default.

    Attributes
    ----------
    kind : OptionKind
        What it is.
    takers : tuple of str
        Schedulers that take it; empty: it says nothing of a schedule.
    least, most : int
        Of a number. Where the default leaves the choice open, that is allowed besides.
    words : tuple of str
        What a word may be, besides a default that leaves the choice open.
    default : object
        None, "" or, of a number whose least is above it, 0 leaves the choice open.
    hidden : bool
        Whether it is for methods that a benchmark compares, and no caller is told of it.
    """

    kind: OptionKind
    takers: tuple[str, ...] = ()
    least: int = 0
    most: int = _MOST
    words: tuple[str, ...] = ()
    default: Any = None
    hidden: bool = False

    @property
    def what(self) -> str:
        """Its kind and default in words."""
        kind = " or ".join(f'"{one}"' for one in self.words) if self.words else self.kind.text
        return kind if self.default in (None, "", 0) else f"{kind}, default {self.default}"


def option(kind: OptionKind, *takers: str, default: Any = None, **limits: Any) -> Any:
    """Return the field of an option, which the documentation of its class explains."""
    about = About(kind=kind, takers=takers, default=default, **limits)
    return dataclasses.field(default=default, metadata={_ABOUT: about})


def declared(options: Any) -> Iterator[tuple[str, About]]:
    """Return name and the rest of each option that is declared so, of a dataclass or one of its values."""
    for field in dataclasses.fields(options):
        if _ABOUT in field.metadata:
            yield field.name, field.metadata[_ABOUT]


def told(kind: Any) -> Iterator[tuple[str, About, str]]:
    """Yield those of the declared options that callers are told of, with what the class's documentation has of each."""
    texts = dict(re.findall(r"^(\w+) : .*\n((?: {4}.+\n?)+)", inspect.cleandoc(kind.__doc__ or ""), re.MULTILINE))
    for name, about in declared(kind):
        if not about.hidden:
            yield name, about, " ".join(texts.get(name, "").split())


def convert(options: Any) -> None:
    """Turn what was given into Python's own values once, so that equal options compare, hash and print equally."""
    for name, about in _all_of(options.__class__):
        value, kind = getattr(options, name), about.kind
        made = type(value)
        if (made is bool and kind is SWITCH) or (made is str and kind is WORD):
            continue  # as it mostly is: a search makes hundreds of options
        if made is int and kind in (NUMBER, BYTES) and -_MOST < value < _MOST:
            continue
        if value is not None or about.default is not None:
            object.__setattr__(options, name, kind.convert(name, value))


def check(options: Any, prefix: str = "", whose: str = "") -> None:
    """Raise `ParamError` for the first option that is beyond its limits or none of its words."""
    for name, about in _all_of(options.__class__):
        value = getattr(options, name)
        if value is None or value == about.default:
            continue
        if about.words and value not in about.words:
            raise ParamError(f"{prefix}{name} {value!r}{whose} does not exist: use one of {', '.join(about.words)}")
        if about.kind in (NUMBER, BYTES) and not about.least <= value <= about.most:
            side = f"below {about.least}" if value < about.least else f"above {about.most}"
            raise ParamError(f"{prefix}{name} = {value} is {side}")


def decoded(kind: Any, values: object, nested: Mapping[str, Any] | None = None, whose: str = "options") -> Any:
    """
    Return a dataclass of options from plain values by name, as JSON has them.

    Parameters
    ----------
    kind : type
        The dataclass.
    values : object
        A mapping from names to values; those left out keep their defaults.
    nested : mapping, optional
        Dataclasses of options that are fields of this one, by name.
    whose : str, optional
        What they are called in errors.

    Raises
    ------
    ParamError
        If these are no names and values, a name is unknown, or a value is none that the option may have.
    """
    if not isinstance(values, Mapping):
        raise ParamError(
            f'{whose} = {shown(values)} is {type_text(values)}: write names and values, as {{"tile": 2048}}'
        )
    nested = nested or {}
    known = [name for name, _, _ in told(kind)] + [*nested]
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 3)
            mend = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(known)}"
            raise ParamError(f"{whose} has no {shown(name)}: {mend}")
    made = {name: decoded(one, values[name], whose=f"{whose}.{name}") for name, one in nested.items() if name in values}
    return kind(**{**values, **made})


@functools.cache  # a search makes hundreds of options
def _all_of(kind: type) -> list[tuple[str, About]]:
    return [*declared(kind)]
