"""Options that are declared once, as the fields of a dataclass: converting, checks and flags follow from that."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Final

from uncut_mpi.errors import ParamError

_MOST: Final = 1 << 62
_ABOUT: Final = "about"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """
    What there is to know about an option besides its name.

    Attributes
    ----------
    flag : str
        Its name on the command line.
    help, metavar : str
        What ``--help-all`` says.
    least, most : int
        Of a number; 0, which leaves the choice open, is allowed besides.
    words : tuple of str
        What it may be, besides "", which leaves the choice open; empty for a number.
    """

    flag: str
    help: str
    metavar: str
    least: int = 0
    most: int = _MOST
    words: tuple[str, ...] = ()


def number(flag: str, metavar: str, text: str, *, least: int = 1, most: int = _MOST) -> Any:
    """Return the field of an option that is a number."""
    about = About(flag=flag, help=text, metavar=metavar, least=least, most=most)
    return dataclasses.field(default=0, metadata={_ABOUT: about})


def choice(flag: str, words: tuple[str, ...], text: str) -> Any:
    """Return the field of an option that is one of some words."""
    about = About(flag=flag, help=text, metavar="|".join(words), words=words)
    return dataclasses.field(default="", metadata={_ABOUT: about})


def declared(options: Any) -> Iterator[tuple[str, About]]:
    """Return name and the rest of each option that is declared so, of a dataclass or one of its values."""
    for field in dataclasses.fields(options):
        if _ABOUT in field.metadata:
            yield field.name, field.metadata[_ABOUT]


def check(options: Any, whose: str) -> None:
    """Raise `ParamError` for the first option that is out of its bounds or none of its words."""
    for name, about in declared(options):
        value = getattr(options, name)
        if not value:
            continue
        if about.words:
            if value not in about.words:
                raise ParamError(f"{name} {value!r} of {whose} does not exist: use one of {', '.join(about.words)}")
        elif value < 0:
            raise ParamError(f"{name} = {value} is below 0")
        elif not about.least <= value <= about.most:
            bound = f"below {about.least}" if value < about.least else f"above {about.most}"
            raise ParamError(f"{name} = {value} ({about.flag}) is {bound}")
