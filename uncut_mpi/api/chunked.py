"""A product that is done in chunks: blocks of its C one after another, by the plans of these."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import ClassVar, TypeAlias

from uncut_mpi.api.plans import Plan, PlanKey, PlanSummary
from uncut_mpi.api.request import Choices, Operands, infos_of
from uncut_mpi.api.trials import Trial
from uncut_mpi.model.arguments import counted
from uncut_mpi.model.parts import Extent
from uncut_mpi.planning.chunks import MOST_KINDS, Chunks
from uncut_mpi.planning.options import changed
from uncut_mpi.planning.schedule import Schedule


@dataclasses.dataclass(eq=False)
class Chunked:
    """
    How a product is done in chunks; the same on all ranks.

    Attributes
    ----------
    key : PlanKey
        Of the whole product.
    by_rows : bool
        Whether chunks are rows of the caller's C, or columns.
    extents : sequence of (int, int)
        First row or column of each chunk, and the one after its last.
    keys : sequence of PlanKey
        Of each chunk.
    plans : dict of PlanKey to Plan
        Of the chunks that are planned, `MOST_KINDS` at most; that of the first one for as long as this lives.
    summary : PlanSummary
        Of all chunks together.
    """

    key: PlanKey
    by_rows: bool
    extents: Sequence[Extent]
    keys: Sequence[PlanKey]
    plans: dict[PlanKey, Plan]
    summary: PlanSummary
    now: ClassVar[None] = None
    tuning: ClassVar[bool] = False
    may_go: ClassVar[bool] = False

    @classmethod
    def of(
        cls, key: PlanKey, chunks: Chunks, matrices: Operands, choices: Choices, make: Callable[[PlanKey], Plan]
    ) -> Chunked:
        """
        Plan the chunks of a product. Collective.

        Parameters
        ----------
        key : PlanKey
            Of the product.
        chunks : Chunks
            Of the C of its column-major problem.
        matrices, choices
            Of the call.
        make : callable
            Makes the plan of a key; collective.
        """
        by_rows = (chunks.axis == 0) != key.problem.swapped
        choices = choices._replace(options=changed(choices.options, tune=0))
        promises = {"reads_c": key.problem.reads_c, "scales_only": key.problem.scales_only}
        keys = [
            PlanKey.of(infos_of(operands_of(matrices, choices, by_rows, extent)), choices, **promises)
            for extent in chunks.extents
        ]
        plans = {one: make(one) for one in [*dict.fromkeys(keys)][:MOST_KINDS]}
        return cls(key, by_rows, chunks.extents, keys, plans, _summary(chunks, by_rows, keys, plans))

    @property
    def shown(self) -> Chunked:
        """What callers are told of."""
        return self

    @property
    def every(self) -> Sequence[Plan]:
        """All that may be bound."""
        return [*self.plans.values()]

    @property
    def schedule(self) -> Schedule:
        """The schedule of the first chunk."""
        return self.plans[self.keys[0]].schedule

    @property
    def digest(self) -> bytes:
        """16 bytes that only the same chunks by the same plans share."""
        return hashlib.blake2b(self.key.digest + self.summary.digest.encode(), digest_size=16).digest()

    def operands(self, matrices: Operands, choices: Choices, number: int) -> Operands:
        """Return what a chunk multiplies: views of the matrices of a call."""
        return operands_of(matrices, choices, self.by_rows, self.extents[number])

    def plan(self, number: int, make: Callable[[PlanKey], Plan], drop: Callable[[Plan], None]) -> Plan:
        """Return the plan of a chunk, made if there is none; the last one then goes if there are too many."""
        key = self.keys[number]
        if key not in self.plans:
            if len(self.plans) >= MOST_KINDS:
                drop(self.plans.popitem()[1])
            self.plans[key] = make(key)
        return self.plans[key]


AnyPlan: TypeAlias = Plan | Trial | Chunked
"""What calls of one key run by: a plan, several of which the fastest is looked for, or those of chunks."""


def operands_of(matrices: Operands, choices: Choices, by_rows: bool, extent: Extent) -> Operands:
    """Return views of A, B and C for some rows or columns of C."""
    a, b, c = matrices
    some = slice(*extent)
    if by_rows:
        return (a[some] if choices.trans_a == "N" else a[:, some]), b, c[some]
    return a, (b[:, some] if choices.trans_b == "N" else b[some]), c[:, some]


def _summary(chunks: Chunks, by_rows: bool, keys: Sequence[PlanKey], plans: dict[PlanKey, Plan]) -> PlanSummary:
    """Return the figures of all chunks together; those without a plan so far are taken to be as the first one is."""
    first = plans[keys[0]].summary
    every = [plans[key].summary if key in plans else first for key in keys]
    links = {link: sum(one.bytes_by_link[link] for one in every) for link in first.bytes_by_link}
    lines = "rows" if by_rows else "columns"
    about = f"{counted(len(keys), 'chunk')} of {chunks.edges[1]} {lines} of C, one after another"
    return dataclasses.replace(
        first,
        how=f"{about}, each: {first.how}",
        tasks=sum(one.tasks for one in every),
        bytes_by_link=links,
        predicted_s=sum(one.predicted_s for one in every),
        plan_s=sum(plan.summary.plan_s for plan in plans.values()),
        digest=hashlib.blake2b("".join(one.digest for one in every).encode(), digest_size=16).hexdigest(),
        softbuf_bytes=[max(of_rank) for of_rank in zip(*(one.softbuf_bytes for one in every), strict=True)],
        host_bytes=[max(of_rank) for of_rank in zip(*(one.host_bytes for one in every), strict=True)],
        chunks=len(keys),
    )
