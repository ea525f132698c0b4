"""
What callers pass, turned into plain Python values once, where it enters; what cannot be is a `ParamError`.

Whatever is a number to numpy is a number here: numpy's scalars of every width, arrays of no dimension, fractions,
decimals. A truth value is no whole number, text is no number, and nothing is rounded to a whole number.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, TypeAlias, TypeVar, get_args

import numpy as np

from uncut_mpi.errors import ParamError
from uncut_mpi.instead import bad_call

BackendName: TypeAlias = Literal["auto", "cuda", "host"]
Number: TypeAlias = float | complex
"""A factor: of real types a float."""

BACKENDS: Final[tuple[BackendName, ...]] = get_args(BackendName)
"""What a caller may ask for; auto is one of the others."""

MOST_BYTES: Final = 2**62
"""Most bytes that a caller may name."""

_SHOWN_CHARACTERS = 60
_MOST = (1 << 63) - 1
_MOST_ITEMS = 1 << 16
_Class = TypeVar("_Class", bound=type[Any])


def value_of_callers(kind: _Class) -> _Class:
    """Let a class, and its public class methods, say of arguments that are not there which it takes."""
    for name, member in [*vars(kind).items()]:
        if name == "__init__":
            setattr(kind, name, _called_right(member))
        elif isinstance(member, classmethod) and not name.startswith("_"):
            setattr(kind, name, classmethod(_called_right(member.__func__)))
    return kind


def _called_right(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except TypeError as error:
            if wrong := bad_call(function, named, error):
                error.args = (wrong,)
            raise

    return called


def whole_number(name: str, value: object) -> int:
    """
    Return a caller's whole number as an int.

    Parameters
    ----------
    name : str
        Of the argument, for the error.
    value : object
        Anything that `operator.index` takes, except truth values.

    Raises
    ------
    ParamError
        If it is no whole number. A float is none, even 2.0.
    """
    if type(value) is int:
        return value
    if not _is_truth(value):
        try:
            return operator.index(value)  # type: ignore[arg-type]
        except Exception:  # whatever the caller's type raises
            pass
    raise ParamError(f"{name} = {shown(value)} is {type_text(value)}: pass a whole number")


def count(name: str, value: object) -> int:
    """
    Return a caller's whole number that fits 64 bits as an int: a number of something, or of a rank.

    Raises
    ------
    ParamError
        If it is none. The caller checks what range it may have.
    """
    number = whole_number(name, value)
    if abs(number) > _MOST:
        raise ParamError(f"{name} has {number.bit_length()} bits, beyond what 64 can hold: pass a smaller number")
    return number


def bytes_in(what: str, text: str) -> int:
    """
    Return the bytes that a text with a unit names, as ``"16GiB"``.

    Raises
    ------
    ParamError
        If it names none; `what` is how it calls the text.
    """
    for power, letter in enumerate("kmgt", 1):
        for suffix, base in ((f"{letter}ib", 1024), (f"{letter}b", 1000)):
            try:
                value = float(text[: -len(suffix)]) * float(base) ** power
            except ValueError:
                continue
            if text.lower().endswith(suffix):
                if 1 <= value <= MOST_BYTES:
                    return round(value)
                raise ParamError(f"{what} is too little or too much: bytes are 1 to {MOST_BYTES}")
    raise ParamError(f"{what} is no number of bytes: write a whole number, or one with a unit as 16GiB, 500MB or 1.5TB")


def byte_count(name: str, value: object) -> int:
    """Return a caller's number of bytes, which a text with a unit may name; errors are those of `count`, `bytes_in`."""
    return bytes_in(f"{name} = {shown(value)}", value) if isinstance(value, str) else count(name, value)


def word(name: str, value: object) -> str:
    """
    Return a caller's word as a str.

    Raises
    ------
    ParamError
        If it is no text. The caller checks which words there are.
    """
    if not isinstance(value, str):
        raise ParamError(f"{name} = {shown(value)} is {type_text(value)}: pass a word")
    return str.__str__(value)


def items(name: str, value: object) -> tuple[object, ...]:
    """
    Return a caller's sequence, or array of one dimension or more, as a tuple of what it has.

    Raises
    ------
    ParamError
        If it is text, no sequence, or longer than any sequence of options.
    """
    if type(value) is tuple:
        return value
    try:
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if isinstance(value, Sequence) and not isinstance(value, str | bytes) and len(value) <= _MOST_ITEMS:
            return tuple(value)
    except Exception:  # whatever the caller's type raises
        pass
    raise ParamError(f"{name} = {shown(value)} is no sequence: pass a tuple{'' if value is None else ', or None'}")


def real_number(name: str, value: object, *, finite: bool = False) -> float:
    """
    Return a caller's real number as a float.

    Parameters
    ----------
    name : str
        Of the argument, for the error.
    value : object
        Anything that numpy takes for a real number.
    finite : bool, default False
        Refuse infinities and NaN.

    Raises
    ------
    ParamError
        If it is no real number, or one that no float64 can hold.
    """
    if type(value) is float:
        number = value
    else:
        kind = _attribute(_attribute(value, "dtype"), "kind")
        has_float = hasattr(type(value), "__float__") or hasattr(type(value), "__index__")
        if isinstance(value, str | bytes | complex) or not has_float or kind in ("c", "m", "M", "S", "U"):
            raise _no_real(name, value)
        if _attribute(value, "ndim"):
            raise _no_real(name, value, "pass one real number, not an array of them")
        try:
            number = float(value)  # type: ignore[arg-type]
            beyond = math.isinf(number) and bool(value != number)
        except OverflowError:
            beyond = True
        except Exception:  # whatever the caller's type raises
            raise _no_real(name, value) from None
        if beyond:
            raise ParamError(f"{name} = {shown(value)} is beyond what a float64 can hold: pass a smaller number")
    if finite and not math.isfinite(number):
        raise ParamError(f"{name} = {number} is not finite: pass a finite number")
    return number


def number(name: str, value: object) -> Number:
    """
    Return a caller's number: a complex if its type is complex, else a float as `real_number` does.

    Raises
    ------
    ParamError
        If it is no number.
    """
    of_array = _attribute(_attribute(value, "dtype"), "kind") == "c" and not _attribute(value, "ndim")
    if isinstance(value, complex) or of_array:
        return complex(value)  # type: ignore[no-any-return,call-overload]
    return real_number(name, value)


def flag(name: str, value: object) -> bool:
    """
    Return a caller's truth value as a bool.

    Raises
    ------
    ParamError
        If it is neither a bool nor numpy's: a text such as ``"no"`` would count as true.
    """
    if _is_truth(value) and not _attribute(value, "ndim"):
        return bool(value)
    raise ParamError(f"{name} = {shown(value)} is {type_text(value)}: pass True or False")


def shown(value: object, text_of: Callable[[object], str] = repr) -> str:
    """Return the repr of a caller's value on one line, cut where it is long; of a value without one, its type."""
    try:
        text = " ".join(text_of(value).split())
    except Exception:  # also of an int with too many digits to print
        return f"<{type(value).__name__}>"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."


def counted(count: int, what: str) -> str:
    """Return a number and its noun: ``"1 rank"``, ``"2 ranks"``."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def there_are(count: int, what: str) -> str:
    """Return ``"there is 1 rank"``, ``"there are 2 ranks"``."""
    return f"there {'is' if count == 1 else 'are'} {counted(count, what)}"


def type_text(value: object) -> str:
    """Return the name of a value's type with its article: ``"an int"``, ``"a str"``."""
    name = type(value).__name__
    article = "an" if name[:1].lower() in ("a", "e", "i", "o") or name == "ndarray" else "a"
    return f"{article} {name}"


def _is_truth(value: object) -> bool:
    return isinstance(value, bool | np.bool_) or str(_attribute(value, "dtype")) in ("bool", "torch.bool")


def _attribute(value: object, name: str) -> object:
    """Return an attribute of a caller's value, whatever that raises; None if it has none."""
    try:
        return getattr(value, name, None)
    except Exception:
        return None


def _no_real(name: str, value: object, mend: str = "pass a real number") -> ParamError:
    return ParamError(f"{name} = {shown(value)} is {type_text(value)}: {mend}")
