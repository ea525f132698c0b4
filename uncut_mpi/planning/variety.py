"""Which of a search's candidates are worth trying for real: those predicted best that differ in kind."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final

from uncut_mpi.planning.search import Candidate

_WORTH_TRYING: Final = 1.25
"""A candidate predicted to take so many times as long as the best one is not tried."""


def varied(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """
    Return up to so many candidates, the best first, no two of a kind.

    What a simulation cannot know is how a library's products run on particular shapes (on an H200 5 to 10 % of a
    product's time either way) and what meets on the machine; schedules with the same blocks meet the same.

    Parameters
    ----------
    candidates : sequence of Candidate
        Best first, at least one.
    count : int
        At least 1.
    """
    chosen: dict[Hashable, Candidate] = {}
    for candidate in candidates:
        if len(chosen) == count or candidate.value > _WORTH_TRYING * candidates[0].value:
            break
        chosen.setdefault(_kind(candidate), candidate)
    return list(chosen.values())


def _kind(candidate: Candidate) -> Hashable:
    options, schedule = candidate.options, candidate.schedule
    shares = tuple(
        round(share / sum(part), 1) for part in (options.row_shares, options.col_shares) if part for share in part
    )
    ranks = len(options.devices or ()) or schedule.num_ranks
    blocking = options.blocking
    own: Hashable = schedule.tile
    if schedule.scheduler == "kblocks":
        own = blocking.columns, blocking.order, blocking.combine
    return schedule.scheduler, schedule.grid, schedule.splits, ranks, shares, own
