"""
Agreement: the same value or the same error on all ranks.

A rank must never raise between two collective calls of which the others make the second: they would
wait for ever. Errors are therefore caught, carried to the next agreement as values, and raised there
by all ranks alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NoReturn, TypeGuard

import numpy as np

from uncut_mpi.errors import (
    PeerFailedError,
    RankMismatchError,
    UncutError,
    Wire,
    agreed,
    from_wire,
    is_agreed,
    reason,
    to_wire,
)
from uncut_mpi.spmd.group import SETTLING_S, Group
from uncut_mpi.units import name_ranks

DIGEST_BYTES = 16

_MOST_NAMED = 16  # that differ, and items of a list that is shown as a whole
_MOST_BITS = 2000  # of a number that is shown in digits; Python may refuse from 640 digits on
_SEVERAL = list, tuple, dict
_SECTIONS = 64  # of a long array, to find where ranks differ


def digest_of(value: bytes) -> np.ndarray:
    """Return the 16-byte digest of encoded arguments, as two uint64."""
    return np.frombuffer(hashlib.blake2b(value, digest_size=DIGEST_BYTES).digest(), np.uint64)


def agree(group: Group, value_digest: bytes, describe: Callable[[], Mapping[str, object]]) -> None:
    """
    Check that all ranks pass the same value. Collective; one message if they do.

    Parameters
    ----------
    value_digest : bytes
        The encoded value, or a digest of it; any length.
    describe : callable
        Returns what an error shows of this rank's value, by names; called only on a mismatch.

    Raises
    ------
    RankMismatchError
        On all ranks, saying what differs and who has what.
    """
    records = group.allgather_bytes(digest_of(value_digest), "comparing arguments")
    if (records != records[0]).any():
        raise_mismatch(group, records, describe)


def raise_mismatch(group: Group, digests: np.ndarray, describe: Callable[[], Mapping[str, object]]) -> None:
    """
    Raise the error of ranks that passed different values. Collective.

    Parameters
    ----------
    digests : ndarray of uint64, shape (size, 2)
        Of every rank's value.
    describe : callable
        Returns what to show of this rank's value, by names.

    Raises
    ------
    RankMismatchError
        Always, on all ranks.
    """
    arrays: dict[str, np.ndarray] = {}
    try:
        leaves = {name: plain_array(value) if _is_array(value) else value for name, value in _leaves(describe())}
        arrays = {name: value for name, value in leaves.items() if _is_array(value) and value.size}
        mine = {name: (_text(value), type(value).__name__) for name, value in leaves.items()}
    except Exception as error:  # the mismatch is what must be said, on every rank
        mine, arrays = {"arguments": (f"(cannot be shown: {reason(error)})", "")}, {}
    every = group.allgather_objects((mine, [*arrays]), "comparing arguments")
    texts = [{name: text for name, (text, _) in said.items()} for said, _ in every]
    alike = [
        name
        for name in every[0][1]
        if all(name in at and text[name] == texts[0][name] for text, (_, at) in zip(texts, every, strict=True))
    ]
    for name in alike:
        index, value = _first_difference(group, arrays[name])
        for text, its in zip(texts, group.allgather_objects(value, "comparing arguments"), strict=True):
            text[f"{name}[{index}]"] = its
    different = len({tuple(digest) for digest in digests.tolist()})
    if len({str(text) for text in texts}) < different:  # they print alike and differ all the same
        for text, (said, _) in zip(texts, every, strict=True):
            kinds = [name for name in said if len({said[name][1] for said, _ in every if name in said}) > 1]
            text.update({name: f"{text[name]} ({said[name][1]})" for name in kinds})
    if len({str(text) for text in texts}) < different:  # in what is not shown; the digest tells them apart
        for text, digest in zip(texts, digests.tolist(), strict=True):
            of_all = [f"{name}={value}" for name, value in text.items() if "." not in name]
            text["digest"] = f"{digest[0]:016x} ({', '.join(of_all[:_MOST_NAMED])})"
    names = dict.fromkeys(itertools.chain(*texts))
    found = {name: [text.get(name, "nothing") for text in texts] for name in names}
    differing = [name for name, values in found.items() if len({*values}) > 1]
    # Calls of two forms have names of their own, which say less than those that they share.
    chosen = [name for name in differing if all(name in text for text in texts)] or differing
    said = "; ".join(f"{name}: {by_rank(found[name])}" for name in chosen[:_MOST_NAMED])
    said += f"; and {len(chosen) - _MOST_NAMED} more" if len(chosen) > _MOST_NAMED else ""
    raise agreed(RankMismatchError(f"ranks passed different values: {said}; pass the same on every rank"))


def plain_array(array: np.ndarray) -> np.ndarray:
    """Return a copy of numbers or texts in native byte order and C order, in which equal elements have equal bytes."""
    plain = np.array(array, array.dtype.newbyteorder("="), order="C")
    parts = plain.view(plain.real.dtype) if plain.dtype.kind == "c" else plain
    if parts.dtype.kind not in "biuSU":
        parts[parts == 0], parts[np.isnan(parts)] = 0, np.nan  # no sign of zero, one NaN
    return plain


def _is_array(value: object) -> TypeGuard[np.ndarray]:
    return isinstance(value, np.ndarray) and value.ndim > 0


def _text(value: object) -> str:
    if _is_array(value):
        return f"{value.dtype} array of shape {value.shape}"
    if _parts(value):
        return type(value).__name__ + (f" of {len(value)}" if isinstance(value, _SEVERAL) else "")
    if _is_long(value):
        return f"{value:#x}"
    return repr(value) if isinstance(value, str) else str(value)


def _is_long(value: object) -> TypeGuard[int]:
    """Return whether Python may refuse to write a number in digits."""
    return isinstance(value, int) and value.bit_length() > _MOST_BITS


def _parts(value: object) -> dict[str, object]:
    """
    Return what is shown each for itself, by what leads to it.

    Of a dataclass without a text of its own the fields, of a dict its values, of a list its items unless it is short
    and they are plain.
    """
    if dataclasses.is_dataclass(value) and type(value).__str__ is object.__str__:
        return {f".{field.name}": getattr(value, field.name) for field in dataclasses.fields(value)}
    if not isinstance(value, _SEVERAL):
        return {}
    parts: dict[object, object] = value if isinstance(value, dict) else dict(enumerate(value))
    several = any(isinstance(part, (*_SEVERAL, np.ndarray)) or _is_long(part) for part in parts.values())
    if isinstance(value, dict) or several or len(parts) > _MOST_NAMED:
        return {f"[{at!r}]": part for at, part in parts.items()}
    return {}


def _leaves(values: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield values by names, each before its parts."""
    for name, value in values.items():
        yield name, value
        yield from _leaves({f"{name}{at}": part for at, part in _parts(value).items()})


def _first_difference(group: Group, array: np.ndarray) -> tuple[str, str]:
    """Return the index and text of the first element that differs among ranks, or of one. Collective."""
    flat, at, length = array.reshape(-1), 0, array.size
    while length > 1:
        step = -(-length // _SECTIONS)
        digests = [digest_of(flat[first : first + step].tobytes()) for first in range(at, at + length, step)]
        everyone = group.allgather_bytes(np.stack(digests), "comparing arguments")
        at += step * int((everyone != everyone[0]).any(axis=(0, 2)).argmax())
        length = min(step, flat.size - at)
    return ", ".join(map(str, np.unravel_index(at, array.shape))), str(flat[at])


def by_rank(values: Sequence[object] | Mapping[int, object]) -> str:
    """Return ``y on rank 3, x on the others``: equal values together, by their lowest ranks, those of most last."""
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items() if isinstance(values, Mapping) else enumerate(values):
        ranks.setdefault(str(value), []).append(rank)
    most = next((value for value, those in ranks.items() if len(values) < 2 * len(those) < 2 * len(values)), None)
    several = [f"{value} on {name_ranks(those)}" for value, those in ranks.items() if value != most]
    return ", ".join(several if most is None else [*several, f"{most} on the others"])


def collective_result(group: Group, error: BaseException | None, what: str, timeout_s: float | None = None) -> None:
    """
    Raise on all ranks what any rank has caught. Collective; one small message if none has.

    Parameters
    ----------
    error : BaseException or None
        What this rank caught.
    what : str
        What was being done.

    Raises
    ------
    UncutError
        The error of the lowest rank that has one: same type and message on all ranks, preceded by
        ``rank r:`` unless all ranks failed alike. An error of a foreign type is raised as it is
        where it arose and as `PeerFailedError` elsewhere.
    """
    status = group.allgather_bytes(np.array([error is not None], np.int8), what, timeout_s)
    if not status.any():
        return
    wires = group.allgather_objects(None if error is None else to_wire(error), what, timeout_s)
    raise_failure(wires, error, what)


def raise_failure(wires: Sequence[Wire | None], error: BaseException | None, what: str) -> NoReturn:
    """
    Raise on all ranks what some have caught, as `collective_result`. Local.

    Parameters
    ----------
    wires : sequence of (str, str) or None
        What each rank has caught, as `to_wire` has it.
    error : BaseException or None
        What this rank caught.
    """
    failed = {rank: wire for rank, wire in enumerate(wires) if wire is not None}
    first, (name, message) = next(iter(failed.items()))
    if error is not None and to_wire(error) == (name, message) and not isinstance(error, UncutError):
        error.add_note(f"(while {what})") if hasattr(error, "add_note") else None
        raise agreed(error)
    if all(wire == wires[first] for wire in wires) and isinstance(error, UncutError):
        raise agreed(error)
    carried = from_wire(name, message, rank=first)
    if not isinstance(carried, PeerFailedError) or name == PeerFailedError.__name__:
        alike = [rank for rank in failed if wires[rank] == wires[first]]
        carried = from_wire(name, f"{name_ranks(alike)}: {message}", rank=first)
    raise agreed(carried) from (None if error is None or to_wire(error) == wires[first] else error)


@contextlib.contextmanager
def collective(group: Group, what: str, timeout_s: float | None = None) -> Iterator[None]:
    """
    Run a block in which a rank may fail alone; an error of any rank leaves it as of `collective_result`. Collective.

    The block itself must hold no collective call that a failing rank would skip.
    """
    error: BaseException | None = None
    try:
        yield
    except BaseException as caught:  # also an interrupt: the other ranks must not wait for this one
        if group.stalled:
            raise
        error = caught
    collective_result(group, error, what, timeout_s)


@contextlib.contextmanager
def on_each_node(group: Group, what: str) -> Iterator[Group]:
    """
    Run a block in which the ranks of each node make collective calls among themselves. Collective.

    An error that all ranks of a node have leaves it on all ranks, as of `collective_result`. One that a rank has alone
    leaves it there only, since those of its node may still wait for it inside.

    Yields
    ------
    Group
        Of this node's ranks; freed at the end.

    Raises
    ------
    StallError
        If other nodes take a minute more than thrice as long as this one: a link between nodes may be cut.
    """
    within, error, began = group.of_node(), None, time.monotonic()
    try:
        yield within
    except Exception as caught:
        if within.stalled or (within.size > 1 and not is_agreed(caught)):
            raise
        error = caught
    finally:
        group.stalled |= within.stalled
        within.free()
    collective_result(group, error, what, SETTLING_S + 3 * (time.monotonic() - began))
