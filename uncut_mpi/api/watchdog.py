"""
What all ranks of a node do, and who waits for which task of whom: told with a stall, and at the signal SIGUSR2.

The signal may come at any time, to one rank or all, and the job goes on. A thread listens, so it is heard even while
the program waits in MPI or for a device. What other ranks do stands on the board that they share; of what it means the
schedule tells. (SIGUSR1 is MPICH's own.) A program that handles SIGUSR2 itself keeps it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from uncut_mpi import _native
from uncut_mpi.device.interface import lane_name
from uncut_mpi.errors import ScheduleError
from uncut_mpi.planning.lower import Code, OperationList, lower
from uncut_mpi.planning.schedule import Kind, LaneKind, Schedule
from uncut_mpi.units import name_ranks
from uncut_mpi.view.parts import make_labels

if TYPE_CHECKING:
    from uncut_mpi.api.lifetime import Holdings

_LOOK_S: Final = 0.3  # between two looks at the board, which tell who gets on
_ONCE_MS: Final = 2000  # a launcher passes a signal on to all ranks
_MOST_LANES: Final = 6  # of a rank, that are told
_FEW_LANES: Final = 2  # and in an error

_mutex = threading.Lock()
_listens = False


def listen() -> None:
    """Let a thread of this process listen for the signal from now on, unless one does or the program handles it."""
    global _listens
    with _mutex:
        if _listens:
            return
        _listens = True
    descriptor = _native.listen_to(signal.SIGUSR2)
    if descriptor >= 0:
        threading.Thread(target=_tell_always, args=(descriptor,), name="uncut_mpi signals", daemon=True).start()


def _tell_always(descriptor: int) -> None:
    from uncut_mpi.api.lifetime import sessions

    while os.read(descriptor, 64):
        for held in sessions():
            try:
                text = report(held) if _is_first(held) else ""
            except Exception as error:  # the session may close meanwhile
                text = f"uncut_mpi: no report: {error!r}"
            sys.stderr.write(text and f"{text}\n")
            sys.stderr.flush()


def _is_first(held: Holdings) -> bool:
    """Return whether no other rank of the node has told within a short time, and note that this one does."""
    assert held.control is not None
    now, told = int(time.monotonic() * 1e3), held.control.told
    first = now - int(told[0]) > _ONCE_MS
    told[0] = now
    return first


def report(held: Holdings) -> str:
    """Return what the ranks of this node do, in lines. Local; it takes `_LOOK_S` while a product runs."""
    group, gate, control = held.group, held.calls.gate, held.control
    assert control is not None
    call, since = control.exchange.mine["call"].item().decode(), f"{time.monotonic() - gate.since_s:.1f} s"
    begun = dict(zip(group.here, (control.turns[: group.local_size] // 4).tolist(), strict=True))
    behind = [rank for rank, number in begun.items() if number < max(begun.values())] or group.behind()
    bound = held.calls.running
    lines = [f"uncut_mpi: rank {group.rank} of {group.size} on {group.hosts[group.rank]} tells what its session does"]
    if not gate.inside:
        lines.append(f"rank {group.rank} is in no call; its last one began {since} ago{call and ': '}{call}")
    elif bound is None or not gate.opened:
        lines.append(f"rank {group.rank} is in {call}, for {since}")
    else:
        lines.append(f"all ranks are in {call}, for {since}; a product of {len(bound.schedule.tasks)} tasks runs")
        words = control.board.words
        before = words.copy()
        time.sleep(_LOOK_S)
        by_host = held.calls.backend.takes_host_memory
        for head, lanes in waits(bound.schedule, words, group.here, by_host=by_host, before=before):
            lines += [head, *(f"  {one}" for one in lanes[:_MOST_LANES])]
            if len(lanes) > _MOST_LANES:
                lines.append(f"  and {len(lanes) - _MOST_LANES} lanes more")
    if behind:
        others = [rank for rank in group.here if rank not in behind]
        wait = "wait" if len(others) > 1 else "waits"
        lines.append(f"{name_ranks(others)} {wait} for {name_ranks(behind)} to begin call {max(begun.values())}")
    return "\n  ".join(lines + _program())


def _program() -> list[str]:
    """Return where the program's main thread is, as it stands outside of this package."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    package = os.path.dirname(os.path.dirname(__file__))
    outside = [one for one in traceback.extract_stack(frame) if not one.filename.startswith((package, "<frozen"))]
    return [f"its program is at {one.filename}:{one.lineno}, in {one.name}: {one.line}" for one in outside[-1:]]


def explain(schedule: Schedule, ranks: Sequence[int], by_host: bool, words: np.ndarray) -> Iterator[str]:
    """Yield for each rank that is not through what its first lanes wait for; parameters as of `waits`."""
    for head, lanes in waits(schedule, words, ranks, by_host=by_host):
        if lanes:
            more = [f"and {len(lanes) - _FEW_LANES} lanes more"] if len(lanes) > _FEW_LANES else []
            yield f"{head}: {', '.join(lanes[:_FEW_LANES] + more)}"


def waits(
    schedule: Schedule, words: np.ndarray, ranks: Sequence[int], *, by_host: bool, before: np.ndarray | None = None
) -> Iterator[tuple[str, list[str]]]:
    """
    Yield for each rank whether it gets on, and what each of its lanes does or waits for.

    Parameters
    ----------
    schedule : Schedule
        What runs.
    words : ndarray
        Of the progress board (`ProgressBoard`).
    ranks : sequence of int
        Those whose words are there.
    by_host : bool
        Whether the host backend computes, whose words count.
    before : ndarray, optional
        The words a little earlier.
    """
    lists = lower(schedule).lists
    labels = [f", {Kind(kind).name}" for kind in schedule.tasks["kind"].tolist()]
    with contextlib.suppress(ScheduleError):  # of one that is wrong, and was not proved
        labels = [f", {name}" if name else other for name, other in zip(make_labels(schedule), labels, strict=True)]
    for rank in ranks:
        found = _lanes(lists, labels, rank, words[rank], by_host)
        lines = [line for line, _ in sorted(found, key=lambda one: one[1])]
        gets_on = before is not None and bool((words[rank] != before[rank]).any())
        over = "has not got on" + (f" for {_LOOK_S} s" if before is not None else "")
        yield f"rank {rank} {'has finished its part' if not lines else 'gets on' if gets_on else over}", lines


def _lanes(
    lists: dict[int, OperationList], labels: list[str], rank: int, words: np.ndarray, by_host: bool
) -> Iterator[tuple[str, int]]:
    """Yield what each lane of a rank that is not through does; 0 if it waits for another rank, 1 for this, 2 if not."""
    program = lists[rank]
    operations = program.operations
    for lane, record in enumerate(program.lanes):
        own, word = np.flatnonzero(operations["lane"] == lane), int(words[lane])
        if not len(own) or record["kind"] == LaneKind.NET:
            continue
        if by_host or record["kind"] == LaneKind.HOST:
            at = int(own[word]) if word < len(own) else -1
        else:  # the last wait that was reached, or passed
            later = own[own >= word // 2]
            at = int(later[0]) if len(later) else -1
        if at < 0:
            continue
        task, code = int(operations["task"][at]), int(operations["code"][at])
        name = f"{lane_name(program, record)}: task {task}{labels[task]}"
        awaited = _awaited(lists, operations[at], rank) if code in (Code.WAIT_FLAG, Code.WAIT_EVENT) else None
        if awaited is None:
            yield f"{name}, or behind it", 2
        else:
            yield (
                f"{name}, waits for task {awaited[1]} of rank {awaited[0]}{labels[awaited[1]]}",
                int(awaited[0] == rank),
            )


def _awaited(lists: dict[int, OperationList], wait: Any, rank: int) -> tuple[int, int] | None:
    """Return whose task an operation waits for: who tells it by the flag or event that it names."""
    by_flag = wait["code"] == Code.WAIT_FLAG
    peer = int(wait["peer"]) if by_flag else rank
    operations = lists[peer].operations
    same = (operations["value"] == wait["value"]) & (operations["slot"] == wait["slot"])
    if by_flag:
        same &= (operations["code"] == Code.SIGNAL) & (operations["in_host"] == wait["in_host"])
        if not wait["in_host"]:
            same &= operations["peer"] == rank
    else:
        same &= (operations["code"] == Code.RECORD) & (operations["lane"] == wait["peer"])
    found = operations["task"][same]
    return (peer, int(found[0])) if len(found) else None
