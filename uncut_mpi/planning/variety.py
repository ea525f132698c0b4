"""Which of a search's candidates are worth trying for real: those predicted best that differ in kind."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Final

from uncut_mpi.planning.candidates import Candidate

_WORTH_TRYING: Final = 1.25
"""A candidate predicted to take so many times as long as the best one is not tried."""

_CLOSE: Final = 1.1
"""Up to this the best of another scheduler comes before more of the same."""


def varied(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """
    Return up to so many candidates, the best first, no two of a kind, with each scheduler's best if it is close.

    A simulation cannot know how a library's products run on particular shapes (on an H200 5 to 15 % of a product's time
    either way). Nor does it know what meets on the machine. Schedules with the same blocks meet the same.

    Parameters
    ----------
    candidates : sequence of Candidate
        Best first, at least one.
    count : int
        At least 1.
    """
    if count == 1:
        return [candidates[0]]
    least = candidates[0].value
    worth = [one for one in candidates if one.value <= _WORTH_TRYING * least]
    of_schedulers: dict[str, Candidate] = {}
    for one in worth:
        if one.value <= _CLOSE * least:
            of_schedulers.setdefault(one.options.scheduler, one)
    kinds: set[Hashable] = set()
    num_ranks = candidates[0].schedule.num_ranks
    chosen: dict[str, Candidate] = {}  # by digest: different options may come to the same
    for one in (*of_schedulers.values(), *worth):
        kind = _kind(one, num_ranks)
        if len(chosen) < count and kind not in kinds:
            kinds.add(kind)
            chosen.setdefault(one.schedule.digest(), one)
    return sorted(chosen.values(), key=lambda one: one.value)


def _kind(candidate: Candidate, num_ranks: int) -> Hashable:
    options = candidate.options
    shares = tuple(
        round(share / sum(part), 1) for part in (options.row_shares, options.col_shares) if part for share in part
    )
    ranks = len(options.devices or ()) or num_ranks
    blocking = options.blocking
    own: Hashable = candidate.tile
    if options.scheduler == "kblocks":
        own = blocking.columns, blocking.rows, blocking.order, blocking.lanes, blocking.delivery, blocking.combine
        own = (*own, blocking.away > 0, blocking.begin)
    whole = math.fsum(area for column in options.areas or () for area in column)
    areas = tuple(tuple(round(area / whole, 1) for area in column) for column in options.areas or ())
    return options.scheduler, candidate.grid, candidate.splits, ranks, shares, areas, own
