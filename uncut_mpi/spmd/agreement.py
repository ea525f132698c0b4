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
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NoReturn, TypeGuard

import numpy as np

from uncut_mpi import _native
from uncut_mpi.errors import (
    PeerFailedError,
    RankMismatchError,
    StallError,
    UncutError,
    Wire,
    agreed,
    from_wire,
    reason,
    to_wire,
)
from uncut_mpi.spmd.group import Group, Missing, Progress, name_ranks

DIGEST_BYTES = 16

RECORD = np.dtype(
    [
        ("digest", np.uint64, 2),
        ("call", "S36"),
        ("epoch", np.uint32),
        ("flags", np.uint32),
        ("status", np.int32),
    ]
)
"""
What ranks tell each other when a call opens and closes, 64 bytes: digest of the arguments, name of the
call (ASCII), epoch, flags, error status (0 = none). Digest, name and epoch are the same on all ranks.
"""

READY, NEWS = 1, 2
"""Flags of a record: the rank has all it needs for the call; the ranks are to take what it has found meanwhile."""

_WAITING, _ALIKE, _ABANDONED = 0, 1, 3  # what a meeting comes to
_LAST_WORDS_S = 0.3
_MOST_NAMED = 16  # that differ, and items of a list that is shown as a whole
_MOST_BITS = 2000  # of a number that is shown in digits; Python may refuse from 640 digits on
_SEVERAL = list, tuple, dict
_SECTIONS = 64  # of a long array, to find where ranks differ
_PAUSE_S = 5e-6  # between two looks of a rank with a core of its own

_COMMON_BYTES = 56  # digest, call and epoch
_RECORD_STRUCT = struct.Struct("=16s36sIIi")  # the same, for one write


def digest_of(value: bytes) -> np.ndarray:
    """Return the 16-byte digest of encoded arguments, as two uint64 for `RECORD`."""
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
    Run a block in which a rank may fail alone; an error of any rank leaves it on all ranks. Collective.

    The block itself must hold no collective call that a failing rank would skip.

    Raises
    ------
    UncutError
        See `collective_result`.
    """
    error: BaseException | None = None
    try:
        yield
    except BaseException as caught:  # also an interrupt: the other ranks must not wait for this one
        if group.stalled:
            raise
        error = caught
    collective_result(group, error, what, timeout_s)


def memory_bytes(group: Group) -> int:
    """Return the bytes of shared memory that a `CallExchange` needs."""
    return _native.Meeting.memory_bytes(group.size)


class CallExchange:
    """
    The exchange of one `RECORD` per rank that opens and closes a call, on buffers kept for all calls.

    The ranks meet in memory that they share, which is quicker than a message of MPI's (docs/performance.md,
    2026-11-22). A rank that has to wait for the others lets MPI get on meanwhile, as it would inside an MPI call.

    Parameters
    ----------
    memory : ndarray of uint8, shape (`memory_bytes(group)`,)
        Zeros in memory that all ranks share.

    Attributes
    ----------
    mine : ndarray of RECORD, shape (1,)
        Filled in by the caller before `exchange`.
    everyone : ndarray of RECORD, shape (size,)
        Records of all ranks; overwritten by the next exchange.
    unanimous : bool
        Whether the last exchange has brought nothing but copies of `mine`.
    """

    def __init__(self, group: Group, memory: np.ndarray) -> None:
        self._group = group
        self._meeting = _native.Meeting(memory, group.rank, group.size, RECORD.itemsize)
        self._pause_s = 0.0 if group.oversubscribed else _PAUSE_S
        self._outcome, self._spin_s, self.unanimous = _WAITING, group.spin_s, False
        self.mine = np.zeros(1, RECORD)
        self.everyone = np.zeros(group.size, RECORD)
        self._mine_raw = self.mine.view(np.uint8)
        self._everyone_raw = self.everyone.view(np.uint8)
        self._common = self._everyone_raw.reshape(group.size, -1)[:, :_COMMON_BYTES]
        self._mine_bytes = self._mine_raw.data

    def fill(self, call: str, digest: bytes, epoch: int, *, flags: int, status: int) -> None:
        """Write `mine`: the call's name (ASCII), the 16-byte digest of its arguments, and the rest. Local."""
        _RECORD_STRUCT.pack_into(self._mine_bytes, 0, digest, call.encode(), epoch, flags, status)

    def exchange(self, what: str, timeout_s: float | None = None, missing: Missing | None = None) -> np.ndarray:
        """
        Give `mine` to all ranks and return the records of all. Collective; allocates nothing.

        Raises
        ------
        StallError
            If a rank does not take part within `timeout_s`; names those that `missing` tells. If others have given up
            this exchange before this rank came; names them.
        PeerFailedError
            If a rank has left the session, whether the others are here or not; names it.
        """
        self._group.check_usable()
        meeting = self._meeting
        if meeting.pending:  # an interrupt ended that wait, but the others still need what comes next to come after it
            self._watch(what, timeout_s, missing)
        self._outcome = meeting.meet(self._mine_raw, self._everyone_raw, self._spin_s)
        if self._outcome == _WAITING:
            self._watch(what, timeout_s, missing)
        elif self._outcome == _ABANDONED:
            self.check_left(what)
        self.unanimous = self._outcome == _ALIKE
        return self.everyone

    def check_left(self, what: str, *, by_giving_up: bool = True) -> None:
        """
        Check that no rank has left. Local.

        Parameters
        ----------
        what : str
            What this rank waits in, for the error.
        by_giving_up : bool, default True
            Whether ranks count that have only given up waiting: who waits for the same as they does so as long as it
            likes.

        Raises
        ------
        PeerFailedError, StallError
            As `exchange`.
        """
        left = self._meeting.left
        if not left:
            return
        gone: dict[str, list[int]] = {}
        for rank, why in left:
            gone.setdefault(why, []).append(rank)
        gone.pop("", None)
        if not gone and not by_giving_up:
            return
        if gone:
            # The launcher may end the job as soon as this rank ends; what the other has to say comes first.
            time.sleep(_LAST_WORDS_S)
            who = ", ".join(f"{name_ranks(ranks)} left the session by {why}" for why, ranks in gone.items())
            raise agreed(PeerFailedError(f"{what}: {who}, so it has ended on all ranks: see that rank's output"))
        who = name_ranks([rank for rank, _ in left])
        raise StallError(
            f"{what}, rank {self._group.rank}: {who} waited for this rank and gave up, "
            "so the session has ended here too: begin and end every call on all ranks in time, or raise "
            "arrival_timeout_s (inside a call timeout_s)"
        )

    @property
    def pending(self) -> bool:
        """Whether an exchange was begun that an interrupt has ended; the next one goes on with it. Local."""
        return self._meeting.pending

    def leave(self, reason: str = "") -> None:
        """
        Take part in no exchange any more, and tell those who wait for this rank, now or later. Local.

        Parameters
        ----------
        reason : str, default ""
            By what, as the name of an error's type; by default this rank has given up waiting.
        """
        self._meeting.leave(reason.encode("ascii", "replace").decode())

    def _watch(
        self, what: str, timeout_s: float | None, missing: Missing | None = None, progress: Progress | None = None
    ) -> None:
        group, collect, everyone = self._group, self._meeting.collect, self._everyone_raw

        def met() -> int:
            group.drive()
            self._outcome = collect(everyone, self._pause_s)
            return self._outcome

        group.watch(met, what, timeout_s, missing=missing, progress=progress)
        if self._outcome == _ABANDONED:
            self.check_left(what)

    def all_same(self) -> bool:
        """Return whether all ranks gave the same digest, call and epoch in the last exchange. Local."""
        return bool((self._common == self._common[0]).all())


_TEXT_BYTES = 2048  # of an error, at most
_FAILED, _LOST = 1, 2  # in the status of a record


class Verdicts(CallExchange):
    """
    The exchange that ends a product: who has failed, and by what. Any thread may make it, since it uses no MPI.

    Parameters
    ----------
    memory : ndarray of uint8, shape (`verdict_bytes(group)`,)
        Zeros in memory that all ranks share.
    """

    def __init__(self, group: Group, memory: np.ndarray) -> None:
        ends = memory_bytes(group)
        super().__init__(group, memory[:ends])
        self._rank = group.rank
        self._texts = memory[ends:].reshape(2, group.size, _TEXT_BYTES)  # used in turn, as the places of a meeting
        self._turn, self._told = 0, False

    def tell(self, error: BaseException | None, spin_s: float = 0.0) -> bool:
        """
        Tell all ranks what this one has met, if it has not; return whether all have. Not collective, but `judge` is.

        Parameters
        ----------
        error : BaseException or None
            What went wrong here; the first 2,048 bytes of its text reach the others.
        """
        if self._told:
            if self._outcome == _WAITING:
                self._outcome = self._meeting.collect(self._everyone_raw, spin_s)
            return self._outcome != _WAITING
        self._told, self._turn = True, self._turn ^ 1
        if error is not None:
            text = "\0".join(to_wire(error)).encode("utf-8", "replace")[: _TEXT_BYTES - 1] + b"\0"
            self._texts[self._turn, self._rank, : len(text)] = np.frombuffer(text, np.uint8)
            lost = isinstance(error, StallError) or getattr(error, "fatal", False)
            self.mine["status"] = _LOST if lost else _FAILED
        self._outcome = self._meeting.meet(self._mine_raw, self._everyone_raw, spin_s)
        return self._outcome != _WAITING

    def judge(
        self, error: BaseException | None, timeout_s: float, progress: Progress
    ) -> tuple[list[Wire | None], bool] | None:
        """
        Return what each rank has met, or None if it is nothing, after `tell`. Collective.

        Parameters
        ----------
        error : BaseException or None
            What this one tells, or has told.
        progress : callable
            As of `Group.watch`.

        Returns
        -------
        (list of (str, str) or None, bool) or None
            Each rank's error as `to_wire` has it, and whether tasks of any may still be in flight. After a stall they
            may, or with a context that is dead (`fatal`); nothing may be freed or reused then.

        Raises
        ------
        StallError, PeerFailedError
            As `CallExchange.exchange`.
        """
        if not self.tell(error, self._spin_s):
            self._watch("closing barrier", timeout_s, progress=progress)
        elif self._outcome == _ABANDONED:
            self.check_left("closing barrier")
        self._told = False
        if error is None and self._outcome == _ALIKE:
            return None
        self.mine["status"], statuses = 0, self.everyone["status"]
        wires: list[Wire | None] = [self._wire(rank) if status else None for rank, status in enumerate(statuses)]
        if error is not None:
            wires[self._rank] = to_wire(error)
        return wires, bool((statuses == _LOST).any())

    def _wire(self, rank: int) -> Wire:
        name, message, *_ = self._texts[self._turn, rank].tobytes().decode("utf-8", "ignore").split("\0")
        return name, message


def verdict_bytes(group: Group) -> int:
    """Return the bytes of shared memory that `Verdicts` need."""
    return memory_bytes(group) + 2 * group.size * _TEXT_BYTES
