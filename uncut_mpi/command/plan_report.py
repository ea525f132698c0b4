"""What the plan command says: lines for a reader, one JSON object for a program; the facts are the same."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from uncut_mpi.command.report import Asked, explained
from uncut_mpi.model.arguments import counted
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.locations import Space
from uncut_mpi.model.machine import Machine
from uncut_mpi.planning.buffers import user_bytes
from uncut_mpi.planning.candidates import Candidate
from uncut_mpi.planning.description import areas_text, describe
from uncut_mpi.planning.metrics import METRICS
from uncut_mpi.planning.options import Blocking, ScheduleOptions
from uncut_mpi.planning.schedule import Role
from uncut_mpi.planning.simulate import Simulation
from uncut_mpi.units import bytes_text, labelled, line, name_ranks, time_text
from uncut_mpi.view.explain import Explanation
from uncut_mpi.view.text import to_text as timeline_text
from uncut_mpi.view.timeline import Timeline
from uncut_mpi.view.traffic import Movement, PortTraffic, Traffic

if TYPE_CHECKING:  # which makes this report
    from uncut_mpi.command.planning import Compared, Found, PlanArguments

_RUNNERS_UP: Final = 5
_OF_RANKS: Final = 8
"""Lines that are shown of ranks at most, and their number if there are more."""
# Options that a description of a schedule says, and those that lines of their own say.
_DESCRIBED: Final = ("scheduler", "tile", "grid", "row_shares", "col_shares", "areas", "blocking")
_SAID_OF_MEMORY: Final = ("device_memory", "host_memory")
# What None says of an option.
_WITHOUT: Final = {"devices": "all", "row_shares": "equal", "col_shares": "equal", "grid": "none", "areas": "none"}

_Options = ScheduleOptions | Blocking


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanFacts:
    """A search and what its best schedule is expected to do."""

    machine: Machine  # what was planned for
    asked: PlanArguments  # the product, where its matrices live, its scalars
    # The schedules tried, in which blocks of C the product is done, its bound and its time. Of a product in chunks,
    # simulation, traffic, timeline and explanation are of the first one.
    found: Found
    search_s: float  # time the search took; it never decides anything
    simulation: Simulation  # of the best
    traffic: Movement  # what the best schedule moves per kind of link, and into and out of every rank's device
    timeline: Timeline  # of the simulation
    explanation: Explanation  # what stays, what moves, and what limits the time
    warning: str = ""  # of a place that costs more than half of the time; empty if none does
    compared: Sequence[Compared] | None = None  # what other places would take, the fastest first; None: not asked for

    @property
    def product(self) -> Asked:
        """The product, as reports have it."""
        asked, problem = self.asked, self.asked.problem
        of_it = *problem.callers_shape, problem.arithmetic, problem.trans_a, problem.trans_b, asked.alpha, asked.beta
        return Asked(*of_it, str(asked.place), self.found.result.metric)

    @property
    def memory_bytes(self) -> np.ndarray:
        """Device memory that each rank needs, its matrices included, int64 of shape (num_ranks,)."""
        schedule = self.found.result.best.schedule
        needed: np.ndarray = schedule.softbuf_bytes().astype(np.int64)
        there = (schedule.buffers["role"] == Role.USER) & ~schedule.in_host()
        np.add.at(needed, schedule.owners()[there], user_bytes(schedule.buffers[there]))
        return needed


def to_text(facts: PlanFacts, width: int) -> str:
    """Return the facts as lines of text with the timeline, which fills `width` columns; ends in a newline."""
    best, machine, bound = facts.found.result.best, facts.machine, facts.found.bound
    limit = f", limited by {bound.limited_by}" if bound.terms else ""
    searched = f"{len(facts.found.result.candidates)} schedules, {facts.found.result.tasks_simulated} tasks simulated"
    lines = [
        # How it was measured can be long: its beginning here, all of it in the JSON.
        line("machine", f"{machine.name}, {counted(machine.num_ranks, 'rank')}: {machine.provenance.split(';')[0]}"),
        *_borrowed_rate(machine, facts.asked.problem.arithmetic),
        line("problem", facts.product.text),
        line("search", f"{searched} in {time_text(facts.search_s)}, for the least {facts.found.result.metric}"),
        line("plan", f"{_how(best)}, {len(best.schedule.tasks)} tasks"),
        *labelled("chunks", _chunks(facts)),
        line("predicted", _predicted(facts)),
        *explained(facts.explanation, facts.warning, in_chunks=facts.found.chunks is not None),
        line("bound", f"{time_text(bound.seconds)}{limit}: {bound.words}"),
        *labelled("others", _others(facts)),
        *labelled("runners-up", _runners_up(facts)),
        *labelled("bytes", [_traffic(one) for one in facts.traffic.links]),
        *labelled("nodes", _nodes(facts)),
        *labelled("ports", _of_ranks((one.rank, _port(one)) for one in facts.traffic.ports)),
        *labelled("memory", _memory(facts)),
        *labelled("places", _places(facts)),
        "",
    ]
    return "\n".join(lines) + "\n" + timeline_text([facts.timeline], width)


def to_json(facts: PlanFacts) -> str:
    """
    Return the facts as one JSON object, ending in a newline.

    Times are in seconds, energies in joules. `transfers` and `transferred_bytes` are per [source, destination] with the
    hosts last. `ports` are the bytes into and out of every rank's device, `nodes` those of every node. `candidates` are
    the schedules tried, the best first; `places` what others would take, if they were compared. Of a product in chunks,
    `predicted_s`, `bound_s` and what the problem is are of all of it; all else is of the first chunk.
    """
    best = facts.found.result.best
    value: dict[str, Any] = {
        **facts.product.values("m", "n", "k", "trans_a", "trans_b", "dtype", "alpha", "beta", "place"),
        "machine": facts.machine.name,
        "machine_provenance": facts.machine.provenance,
        "ranks": facts.machine.num_ranks,
        "metric": facts.product.metric,
        **_candidate(best),
        "predicted_s": facts.found.predicted_s,
        "chunks": None
        if facts.found.chunks is None
        else {"of": _lines(facts), "edges": list(facts.found.chunks.edges)},
        "bound_s": facts.found.bound.seconds,
        "limited_by": facts.found.bound.limited_by,
        "bound_formula": facts.found.bound.words,
        "bound_terms": dict(facts.found.bound.terms),
        "digest": best.schedule.digest(),
        "idle_share": facts.simulation.idle_share.tolist(),
        "bytes": {one.link: one.nbytes for one in facts.traffic.links},
        "least_bytes": {one.link: one.least_bytes for one in facts.traffic.links},
        "ports": [dataclasses.asdict(one) for one in facts.traffic.ports],
        "nodes": [dataclasses.asdict(one) for one in facts.traffic.nodes],
        "least_bytes_of_a_node": facts.found.least_of_a_node,
        "explanation": dataclasses.asdict(facts.explanation),
        "warning": facts.warning or None,
        "places": None if facts.compared is None else [_without_infinity(one) for one in facts.compared],
        "transfers": facts.simulation.transfers().tolist(),
        "transferred_bytes": facts.simulation.transferred_bytes().tolist(),
        "memory_bytes": facts.memory_bytes.tolist(),
        "device_memory": facts.machine.memory_bytes.tolist(),
        "host_bytes": facts.found.result.best.schedule.softbuf_bytes(Space.HOST).tolist(),
        "host_memory": facts.found.result.best.options.host_memory,
        "tasks_simulated": facts.found.result.tasks_simulated,
        "search_s": facts.search_s,
        "candidates": [_candidate(one) for one in facts.found.result.candidates],
    }
    return json.dumps(value, indent=1, allow_nan=False) + "\n"


def _candidate(candidate: Candidate) -> dict[str, Any]:
    schedule = candidate.schedule
    return {
        "scheduler": schedule.scheduler,
        "grid": "{}x{}".format(*schedule.callers_grid),
        "splits": schedule.splits,
        "how": describe(schedule, candidate.options),
        "tile": schedule.tile,
        "tasks": len(schedule.tasks),
        "predicted_s": candidate.predicted_s,
        "bound_s": candidate.bound(),
        "energy_j": candidate.energy_j,
        "options": dataclasses.asdict(candidate.options.of_its_scheduler),
    }


def _chunks(facts: PlanFacts) -> list[str]:
    """Return in which blocks of C a product is done that one schedule would be too large for."""
    if facts.found.chunks is None:
        return []
    count, most = len(facts.found.chunks.extents), facts.found.chunks.edges[1]
    first = time_text(facts.found.result.best.predicted_s)
    return [
        f"{count} of {most} {_lines(facts)} of C, one after another; the first is expected to take {first}",
        "predicted and bound are of all chunks, all else is of the first",
    ]


def _lines(facts: PlanFacts) -> str:
    """Return what chunks have some of, of the caller's C."""
    assert facts.found.chunks is not None
    return "rows" if (facts.found.chunks.axis == 0) != facts.asked.problem.swapped else "columns"


def _how(candidate: Candidate) -> str:
    """Return a candidate's scheduler, how it divides the problem, and its other options that are not the defaults."""
    schedule = candidate.schedule
    fixed = _differences(ScheduleOptions(), candidate.options, without=(*_DESCRIBED, *_SAID_OF_MEMORY))
    return ", ".join([schedule.scheduler, describe(schedule, candidate.options), *fixed])


def _predicted(facts: PlanFacts) -> str:
    best = facts.found.result.best
    seconds = facts.found.predicted_s
    parts = [time_text(seconds)]
    if seconds > 0 and facts.asked.problem.has_product:
        parts.append(f"{facts.asked.problem.flops / seconds / 1e12:.4g} TFLOP/s")
    if seconds > 0:
        parts.append(f"bound / predicted {facts.found.bound.seconds / seconds:.1%}")
    # Energies count a device that does nothing as its power at rest; machines that others measured lack it.
    if facts.found.chunks is not None:
        return ", ".join(parts)
    unknown = best.energy_j > 0 and not facts.machine.idle_watts.any()
    at_rest = " without power at rest, which is not known here" if unknown else ""
    return ", ".join(parts) + _energy(best, facts.found.result.metric) + at_rest


def _energy(candidate: Candidate, metric: str) -> str:
    """Return the energy of all devices, where it is known, and what was minimised, where it is something else."""
    energy = f", {candidate.energy_j:.4g} J" if candidate.energy_j > 0 else ""
    return energy if metric in ("time", "pdp") else f"{energy}, {metric} {candidate.value:.4g} {METRICS[metric].unit}"


def _others(facts: PlanFacts) -> list[str]:
    """Return the best of what is of another kind: of the choice's scheduler on another grid, and of the others."""
    best, lines = facts.found.result.best, []
    kinds = {best.options.scheduler}
    for one in facts.found.result.candidates:
        ours = one.options.scheduler == best.options.scheduler
        kind = "another grid" if ours and one.shape != best.shape else one.options.scheduler
        if kind not in kinds:
            kinds.add(kind)
            lines.append(f"{time_text(one.predicted_s)}: {_how(one)}")
    return lines


def _runners_up(facts: PlanFacts) -> list[str]:
    best, *others = facts.found.result.candidates
    if not others:
        return ["none was simulated"]
    shown, lines = [best], []
    for one in others:
        alike = [other for other in shown if other.predicted_s == one.predicted_s]
        if one.schedule.digest() in [other.schedule.digest() for other in alike]:
            continue  # options that make no difference here
        shown.append(one)
        lines.append(f"{time_text(one.predicted_s)}{_energy(one, facts.found.result.metric)}: {_changes(best, one)}")
        if len(lines) == _RUNNERS_UP:
            break
    return lines or ["none: all that was simulated comes to the same schedule"]


def _changes(best: Candidate, other: Candidate) -> str:
    """Return what a runner-up does otherwise; one of another scheduler, what it does."""
    if other.options.scheduler != best.options.scheduler:
        return _how(other)
    changes = _differences(best.options, other.options, without=("blocking",))
    changes += _differences(best.options.blocking, other.options.blocking)
    return ", ".join(changes) or "the same options"


def _differences(base: _Options, other: _Options, without: Sequence[str] = ()) -> list[str]:
    """Return the fields in which one of two options differs from the base, as words."""
    changed = []
    for field in dataclasses.fields(other):
        value = getattr(other, field.name)
        if field.name not in without and value != getattr(base, field.name):
            changed.append(f"{field.name.replace('_', ' ')} {_value_text(field.name, value)}")
    return changed


def _value_text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if name == "grid" and value is not None:
        return f"{value[0]}x{value[1]}"
    if name == "areas" and value is not None:
        return areas_text(value)
    if isinstance(value, tuple):
        return ",".join(f"{one:.3g}" if isinstance(one, float) else str(one) for one in value)
    return _WITHOUT.get(name, "chosen") if value in (None, "") else str(value)


def _traffic(one: Traffic) -> str:
    moved = f"{one.link.replace('_', ' ')}: {bytes_text(one.nbytes)}"
    if one.nbytes < one.least_bytes:
        return f"{moved}; {bytes_text(one.least_bytes)} if every byte came once"
    return _against(moved, one.nbytes, one.least_bytes)


def _nodes(facts: PlanFacts) -> list[str]:
    """Return which node takes most, which gives most, and what one takes and gives in any schedule."""
    nodes = facts.traffic.nodes
    if len(nodes) == 1:
        return []
    into, out_of = max(nodes, key=lambda one: one.into_bytes), max(nodes, key=lambda one: one.out_of_bytes)
    both = max(one.into_bytes + one.out_of_bytes for one in nodes)
    most = _against(
        f"most into one: {bytes_text(into.into_bytes)}, node {into.node}", into.into_bytes, into.least_into_bytes
    )
    least = facts.found.least_of_a_node
    in_any = f"; in any schedule one has at least {bytes_text(least)}" if least else ""
    return [
        most,
        f"most out of one: {bytes_text(out_of.out_of_bytes)}, node {out_of.node}",
        f"most into and out of one: {bytes_text(both)}{in_any}",
    ]


def _port(one: PortTraffic) -> str:
    ways = (("in", one.into_bytes, one.least_into_bytes), ("out", one.out_of_bytes, one.least_out_of_bytes))
    return "; ".join(_against(f"{way} {bytes_text(moved)}", moved, least) for way, moved, least in ways)


def _against(text: str, nbytes: int, least_bytes: int) -> str:
    times = f", {nbytes / least_bytes:.2f}×" if least_bytes else ""
    return f"{text}, at least {bytes_text(least_bytes)}{times}"


def _memory(facts: PlanFacts) -> list[str]:
    allowed = facts.found.result.best.options.host_memory
    most = int(facts.found.result.best.schedule.softbuf_bytes(Space.HOST).max())
    of = f" of {bytes_text(allowed)} allowed" if allowed else ""
    host = [f"host memory for copies of matrices: {bytes_text(most)}{of} on each rank at most"] if most else []
    pairs = zip(facts.memory_bytes.tolist(), facts.machine.memory_bytes.tolist(), strict=True)
    return host + _of_ranks(enumerate(f"{bytes_text(needed)} of {bytes_text(there)}" for needed, there in pairs))


def _places(facts: PlanFacts) -> list[str]:
    """Return a table of what other places would take."""
    if facts.compared is None:
        return []
    rows = [("expected", "bound", "set by", "busiest", "--place")]
    for one in facts.compared:
        place = f"{one.place} (as asked)" if one.place == facts.product.place else one.place
        if one.error:
            rows.append(("none", "", "", "", f"{place}: {one.error}"))
            continue
        busy = f"{one.busiest}, {one.busy_share:.0%}".replace("%", " %")
        rows.append((time_text(one.predicted_s), time_text(one.bound_s), one.limited_by, busy, place))
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    return ["   ".join([*map(str.ljust, row, widths), row[-1]]) for row in rows]


def _without_infinity(one: Compared) -> dict[str, Any]:
    """Return its fields as JSON has them: what there is not as null."""
    return {name: None if value in ("", math.inf) else value for name, value in dataclasses.asdict(one).items()}


def _of_ranks(texts: Iterable[tuple[int, str]]) -> list[str]:
    """Return lines of ranks and what is said of them, one for all of whom the same is said, and not too many."""
    alike: dict[str, list[int]] = {}
    for rank, text in texts:
        alike.setdefault(text, []).append(rank)
    lines = [f"{name_ranks(ranks)}: {text}" for text, ranks in alike.items()]
    left = sum(map(len, list(alike.values())[_OF_RANKS:]))
    return [*lines[:_OF_RANKS], f"{left} more ranks: --json has them"] if left > 1 else lines


def _borrowed_rate(machine: Machine, dtype: DType) -> list[str]:
    """Say so where a machine was measured before there was the type, and its products are planned as slower ones."""
    if dtype.name in machine.typical_gemm_tflop_per_s or not machine.has_gemm_rate(dtype):
        return []
    if dtype.is_complex:
        found = f"a quarter of those of {dtype.real.name} is taken: a complex operation is four real ones"
    else:
        found = "those of f32 are taken, so predictions are too long"
    return [line("rates", f"none measured for {dtype.name}: {found}")]
