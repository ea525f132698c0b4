"""The plans that one-shot calls of a session keep, and the way to the one that a repeated call means."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from uncut_mpi.api.keys import PlanKey
from uncut_mpi.api.matrix import Name
from uncut_mpi.api.plans import AnyPlan
from uncut_mpi.api.request import Request, infos_of
from uncut_mpi.api.searches import Searches
from uncut_mpi.planning.options import ScheduleOptions

_MOST_CALLS = 256
"""Calls whose plan is known without making its key, which takes longer than the rest of a small call."""

_Call = tuple[Name, Name, Name, tuple[Hashable, ...], bool, bool]


class PlanCache:
    """
    A limited number of plans, the least recently used of which goes first.

    Ranks keep the same plans, whatever calls fail on some of them: what is kept changes when all are in one call.

    Parameters
    ----------
    max_plans : int
        At least 1.
    drop : callable
        Told of a plan that goes.
    searches : Searches
        Where calls are counted of plans by rule, which are followed by better ones.
    """

    def __init__(self, max_plans: int, drop: Callable[[AnyPlan], None], searches: Searches) -> None:
        self._max_plans, self._drop, self._searches = max_plans, drop, searches
        self._plans: dict[PlanKey, AnyPlan] = {}
        self._used: dict[AnyPlan, int] = {}
        self._uses = 0
        # By matrices and what else a key is made of; a matrix keeps its name, shape and place as long as it lives.
        self._calls: dict[_Call, tuple[ScheduleOptions, AnyPlan]] = {}

    def find(self, request: Request) -> AnyPlan | PlanKey:
        """
        Return the plan of a call, or the key by which one is to be made. Local.

        ParamError for what cannot be multiplied. Nothing that ranks have to agree on changes: they may yet be found to
        be in different calls.
        """
        _, (a, b, c), (alpha, beta), (trans_a, trans_b, options, triangle, forms, epilogue), _ = request
        how = trans_a, trans_b, triangle, forms, epilogue and (epilogue.activation, *epilogue.names)
        call = (a.info.name, b.info.name, c.info.name, how, beta != 0, alpha == 0)
        known = self._calls.get(call)
        if known is not None and (known[0] is options or known[0] == options):
            return known[1]
        key = PlanKey.of(infos_of(request.matrices), request.choices, reads_c=beta != 0, scales_only=alpha == 0)
        kept = self.known(key)
        if isinstance(kept, PlanKey):
            return kept
        if len(self._calls) >= _MOST_CALLS:
            self._calls.clear()
        self._calls[call] = options, kept
        return kept

    def known(self, key: PlanKey) -> AnyPlan | PlanKey:
        """Return the plan of a key, or the key if one is to be made. Local."""
        return self._plans.get(key, key)

    def keep(self, plan: AnyPlan) -> None:
        """
        Keep a plan that all ranks use in one call, in the place of any other of its key. Local; the same on all ranks.

        The least recently used plans beyond the limit go.
        """
        self._uses += 1
        if plan not in self._used:
            before = self._plans.pop(plan.key, None)
            self._forget(before)
            if before is not None and before.summary.search_after:
                self._drop(before)
            self._plans[plan.key] = plan
            self._searches.watch(plan)
            while len(self._plans) > self._max_plans:
                oldest = min(self._used, key=self._used.__getitem__)
                del self._plans[oldest.key]
                self._forget(oldest)
                self._drop(oldest)
        self._used[plan] = self._uses
        if plan in self._searches.left:
            self._searches.count(plan)

    def clear(self) -> None:
        """Forget all plans, and search for none any more. Local."""
        self._searches.close()
        self._plans.clear()
        self._used.clear()
        self._calls.clear()

    def _forget(self, plan: AnyPlan | None) -> None:
        if plan is not None:
            del self._used[plan]
            self._searches.forget(plan)
            self._calls.clear()
