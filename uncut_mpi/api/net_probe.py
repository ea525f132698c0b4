"""Measuring the net between nodes by messages between their ranks, through memory of the host. Collective."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from uncut_mpi.errors import StallError, agreed
from uncut_mpi.model.net import ALONE, BOTH_WAYS, NODES, RANKS, Flow, NetSample
from uncut_mpi.spmd import agreement
from uncut_mpi.spmd.group import SETTLING_S, Group, keep_until_over
from uncut_mpi.spmd.transport import MpiTransport

SHORT_BYTES: Final = 8
QUICK_BYTES: Final = 4 << 20
"""Of the messages of the quick form, the short and the long one."""

_WHAT: Final = "measuring the net between nodes"
_MOST_S: Final = 2.0
"""What one message may be expected to take; longer ones are left out."""
_FEW: Final = 3
_MANY: Final = 40
_SEVERAL: Final = 10
_QUICK_S: Final = 0.02
_LIMIT_S = SETTLING_S
"""How long a message is waited for, and a rank."""

Enough = Callable[[Sequence[float]], bool]
"""Tells of some times (s), the same on all ranks, whether no more are needed."""


def measure_net(
    group: Group,
    *,
    sizes: Sequence[int] = (SHORT_BYTES, QUICK_BYTES),
    whole: bool = False,
    enough: Enough = lambda seconds: len(seconds) >= _SEVERAL or sum(seconds) > _QUICK_S,
    time_limit_s: float = 10.0,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> list[NetSample]:
    """
    Return what messages between nodes take; the same on every rank. Collective.

    Who sends to whom follows from where ranks are, and not from who asks.

    Parameters
    ----------
    group : Group
        Ranks of several nodes.
    sizes : sequence of int
        Bytes of a message, ascending. A net on which the long ones would take more than 2 s is measured without them.
    whole : bool
        Every node to the next, 2, 4, 8, … ranks at once, and both ways. Else one pair of nodes, one rank and all.
    enough : callable
        Whether times are enough; at most 40 are taken.
    time_limit_s : float
        Afterwards each probe is measured three times only (s).
    progress : callable
        Told how many probes are done, of how many, and what comes next.

    Raises
    ------
    StallError
        On all ranks, if a message or a rank is awaited for 60 s.
    UncutError
        On all ranks, what went wrong on one.
    """
    deadline_s = time.perf_counter() + time_limit_s
    messages = _Messages(group, lambda seconds, late: len(seconds) >= _FEW and (late or enough(seconds)), deadline_s)
    steps = _steps(group, sizes, whole=whole)
    samples, longest = list[NetSample](), sizes[0]
    try:
        for done, (kind, flows, size) in enumerate(steps):
            nbytes = size or longest
            progress(done, len(steps), f"{kind}: {nbytes} bytes over the net")
            if nbytes > longest > sizes[0] and samples[-1].median_s * nbytes / longest > _MOST_S:
                continue
            longest = max(longest, nbytes)
            samples.append(NetSample(kind, flows, nbytes, messages.times(flows, nbytes)))
    except StallError as error:
        hosts = ", ".join(group.hosts[group.node_of.index(node)] for node in range(group.num_nodes))
        raise agreed(
            StallError(
                f"{_WHAT} ({hosts}): a message or a rank did not come within {_LIMIT_S:g} s; a node is cut off or a "
                "rank has failed: see what the ranks print, and try the net alone, python -m mpi4py.bench pingpong"
            )
        ) from error
    progress(len(steps), len(steps), "done")
    return samples


def _steps(group: Group, sizes: Sequence[int], *, whole: bool) -> list[tuple[str, tuple[Flow, ...], int]]:
    """Return kind, messages and bytes of each probe, in their order; 0 bytes are the longest message that was sent."""
    places = [[rank for rank, its in enumerate(group.node_of) if its == node] for node in range(group.num_nodes)]
    edges = list(zip(places, [*places[1:], places[0]], strict=True))  # of each node to the next
    counts = [min(len(end) for end in edge) for edge in edges]
    main = counts.index(max(counts))

    def between(edge: int, count: int) -> tuple[Flow, ...]:
        """Return messages of so many ranks of a node, spread over its adapters however many it has."""
        source, to = ([end[at * len(end) // count] for at in range(count)] for end in edges[edge])
        return tuple(zip(source, to, strict=True))

    steps = [(ALONE, between(main, 1), nbytes) for nbytes in sizes]
    if whole:
        steps += [
            (ALONE, between(edge, 1), nbytes) for edge in range(len(edges)) if edge != main for nbytes in (sizes[0], 0)
        ]
    powers = [1 << power for power in range(1, counts[main].bit_length())] if whole else []
    steps += [(RANKS, between(main, count), 0) for count in sorted({*powers, counts[main]} - {1})]
    every = tuple(flow for edge, count in enumerate(counts) for flow in between(edge, count))
    both = (*between(main, 1), *(flow[::-1] for flow in between(main, 1)))
    if whole and {*both} != {*every}:
        steps.append((BOTH_WAYS, both, 0))
    return [*steps, (NODES, every, 0)]


class _Messages:
    """Times messages; what it decides, all ranks decide by the same numbers."""

    def __init__(self, group: Group, enough: Callable[[Sequence[float], bool], bool], deadline_s: float) -> None:
        self._group, self._transport, self._enough = group, MpiTransport(group), enough
        self._deadline_s = deadline_s

    def times(self, flows: Sequence[Flow], nbytes: int) -> tuple[float, ...]:
        """Return what some messages at once take, each time that they are sent (s). Collective."""
        group = self._group
        with agreement.collective(group, _WHAT, _LIMIT_S):
            # Their pages are there before anything is timed.
            sent = [np.zeros(nbytes, np.uint8) for source, _ in flows if source == group.rank]
            received = [np.zeros(nbytes, np.uint8) for _, to in flows if to == group.rank]
        seconds, late = list[float](), False
        while len(seconds) < 1 + _FEW or not (len(seconds) > _MANY or self._enough(seconds[1:], late)):
            mine = self._once(flows, sent, received)
            record = np.array([mine, time.perf_counter() > self._deadline_s])
            told = group.allgather_bytes(record, _WHAT, _LIMIT_S)
            seconds.append(float(told[:, 0].max()))
            late = bool(told[:, 1].any())
        return tuple(seconds[1:])  # the first one opens connections

    def _once(self, flows: Sequence[Flow], sent: Sequence[np.ndarray], received: Sequence[np.ndarray]) -> float:
        """Send each message once, and a byte back; return what the slowest of this rank's took (s), 0 of none."""
        group, transport = self._group, self._transport
        to = [flow[1] for flow in flows if flow[0] == group.rank]
        come = [flow[0] for flow in flows if flow[1] == group.rank]
        group.barrier(_WHAT, _LIMIT_S)
        began, took = time.perf_counter(), 0.0
        # What two ranks send each other keeps its order: first the messages, then the bytes that answer.
        coming = [(rank, transport.receive(data, rank)) for rank, data in zip(come, received, strict=True)]
        leaving = [transport.send(data, rank) for rank, data in zip(to, sent, strict=True)]
        answers = [transport.receive(np.empty(1, np.uint8), rank) for rank in to]

        def over() -> bool:
            nonlocal took
            for one in [one for one in coming if one[1]()]:
                coming.remove(one)
                leaving.append(transport.send(np.zeros(1, np.uint8), one[0]))
            for under_way in (answers, leaving):
                under_way[:] = [done for done in under_way if not done()]
            took = took or (0.0 if answers else time.perf_counter() - began)
            return not (coming or answers or leaving)

        try:
            group.watch(over, _WHAT, _LIMIT_S)
        except BaseException:
            for is_over in (*(one[1] for one in coming), *answers, *leaving):
                keep_until_over(is_over, (sent, received))
            raise
        return took if to else 0.0
