"""The plans that one-shot calls of a session keep, and the way to the one that a repeated call means."""

from __future__ import annotations

from collections.abc import Callable

from uncut_mpi.api.entries import PlanEntry, PlanKey
from uncut_mpi.api.gemm_plan import Operands
from uncut_mpi.planning.options import ScheduleOptions

_MOST_CALLS = 256
"""Calls whose plan is known without making its key, which takes longer than the rest of a small call."""

_Call = tuple[int, int, int, str, str, bool, bool]


class PlanCache:
    """
    A bounded number of plans, the least recently used of which goes first.

    Ranks keep the same plans, whatever calls fail on some of them: what is kept changes when all are in one call.

    Parameters
    ----------
    max_plans : int
        At least 1.
    """

    def __init__(self, max_plans: int) -> None:
        self._max_plans = max_plans
        self._plans: dict[PlanKey, PlanEntry] = {}
        self._used: dict[PlanEntry, int] = {}
        self._uses = 0
        # By matrices and what else a key is made of; a matrix keeps its number, shape and place as long as it lives.
        self._calls: dict[_Call, tuple[ScheduleOptions | None, PlanEntry]] = {}

    def __len__(self) -> int:
        return len(self._plans)

    def find(
        self,
        matrices: Operands,
        trans_a: str,
        trans_b: str,
        reads_c: bool,
        alpha_is_zero: bool,
        options: ScheduleOptions | None,
        make_key: Callable[[], PlanKey],
    ) -> PlanEntry:
        """
        Return the plan of a call, or a new entry that is to be filled and kept. Local.

        Nothing that ranks have to agree on changes: they may yet be found to be in different calls.

        Parameters
        ----------
        matrices : tuple of Matrix
            A, B and C, alive and of this session.
        trans_a, trans_b, reads_c, alpha_is_zero, options
            What the key depends on besides.
        make_key : callable
            Returns the key, or raises for what cannot be multiplied; called for calls that are not known.
        """
        a, b, c = matrices
        call = (a.info.number, b.info.number, c.info.number, trans_a, trans_b, reads_c, alpha_is_zero)
        try:
            known = self._calls.get(call)
        except TypeError:  # a flag that no plan has: what makes the key says so
            known = None
        if known is not None and (known[0] is options or _same(known[0], options)):
            return known[1]
        key = make_key()
        kept = self._plans.get(key)
        if kept is None:
            return PlanEntry(key)
        if len(self._calls) >= _MOST_CALLS:
            self._calls.clear()
        self._calls[call] = options, kept
        return kept

    def use(self, kept: PlanEntry) -> None:
        """Note that all ranks use a plan that is kept, in one call. Local; the same on all ranks."""
        self._uses += 1
        self._used[kept] = self._uses

    def keep(self, made: PlanEntry) -> None:
        """Take in a plan that was filled; close the least recently used ones beyond the bound. As `use`."""
        self._plans[made.key] = made
        self.use(made)
        while len(self._plans) > self._max_plans:
            oldest = min(self._used, key=self._used.__getitem__)
            self._calls.clear()
            del self._used[oldest], self._plans[oldest.key]
            oldest.close()

    def entries(self) -> list[PlanEntry]:
        """Return the plans that are kept. Local."""
        return list(self._plans.values())

    def clear(self) -> None:
        """Forget all plans. Local."""
        self._plans.clear()
        self._used.clear()
        self._calls.clear()


def _same(one: ScheduleOptions | None, other: object) -> bool:
    return one is not None and isinstance(other, ScheduleOptions) and one == other
