"""What a run of the gemm command says: lines for a reader, one JSON object for a program; the facts are the same."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from uncut_mpi.command.flag_values import scalar_json, scalar_text
from uncut_mpi.command.nonfinite import NonFinite
from uncut_mpi.model.arguments import Number, counted
from uncut_mpi.model.bounds import Bound
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.problem import OP_MARKS
from uncut_mpi.units import LABEL_WIDTH, bytes_text, labelled, line, time_text
from uncut_mpi.view.explain import Explanation

if TYPE_CHECKING:  # `plan`, whose lines these are too, needs neither sessions nor MPI
    from uncut_mpi.api.plans import PlanSummary
    from uncut_mpi.command.check import CheckResult
    from uncut_mpi.command.product import Timing

_FEW_RANKS: Final = 8
"""The memory of each of so many is said."""

_LINK_NAMES: Final = {
    "host_to_device": "host to device",
    "device_to_host": "device to host",
    "device_to_device": "device to device",
    "node_to_node": "node to node",
    "local": "within a memory",
}


class Asked(NamedTuple):
    """A product as its command has it: extents (elements), type, ops, scalars, where its matrices live, the metric."""

    m: int
    n: int
    k: int
    dtype: DType
    trans_a: str
    trans_b: str
    alpha: Number
    beta: Number
    place: str
    metric: str

    @property
    def text(self) -> str:
        """What is computed, of what, and where its matrices live."""
        first, second = f"A{OP_MARKS[self.trans_a]}", f"B{OP_MARKS[self.trans_b]}"
        old = f" + {scalar_text(self.beta)} C" if self.beta != 0 else ""
        computed = f"C := {scalar_text(self.alpha)} {first} {second}{old}, m×n×k = {self.m}×{self.n}×{self.k}"
        return f"{computed}, {self.dtype.name}, A, B, C at {self.place}"

    def values(self, *names: str) -> dict[str, Any]:
        """Return some fields as JSON has them."""
        of = {"dtype": self.dtype.name, "alpha": scalar_json(self.alpha), "beta": scalar_json(self.beta)}
        return {name: of.get(name, getattr(self, name)) for name in names}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What was run and on what."""

    version: str  # of this package
    command_line: str  # as it was typed
    date: str  # start of the run, ISO 8601 with its offset from UTC
    hosts: Sequence[str]  # names of the nodes, in the order of their first ranks
    devices: Sequence[str]  # device name of every rank; with the host backend the processor's
    cores: int  # cores that the ranks together may run on
    mpi: str  # MPI library and version
    # "python", "numpy", "mpi4py", and what computes: "blas" and, with cuda, "cupy", "cuda" and
    # "driver".
    versions: Mapping[str, str]
    ranks: int  # ranks, nodes: how many, on how many nodes
    nodes: int
    backend: str  # backend, backend_reason: "cuda" or "host", and why
    backend_reason: str
    machine: str  # name of the machine that was planned for
    nonfinite: Sequence[NonFinite] = ()  # NaN and infinity in the input files that are read

    @property
    def where(self) -> str:
        """Ranks and nodes, in words."""
        return f"{counted(self.ranks, 'rank')} on {counted(self.nodes, 'node')}"

    @property
    def device(self) -> str:
        """What computes, in words: ``4 × NVIDIA H200``, or the host backend with its ranks and cores."""
        if self.backend == "host":
            names = ", ".join(dict.fromkeys(self.devices))
            return f"host backend, {self.where}, {names}, {counted(self.cores, 'core')}"
        return ", ".join(f"{count} × {name}" for name, count in Counter(self.devices).items())


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """One plan, measured and checked."""

    about: Circumstances  # what was run and on what
    asked: Asked  # the product
    summary: PlanSummary  # what the plan does
    timing: Timing  # what its calls took
    bound: Bound  # what no schedule can beat at the machine's rates
    check: CheckResult | None  # what was compared, and the verdict; None without a check
    trace: str = ""  # where the timeline of one more call is, and what it shows; empty without one
    staged: Sequence[str] = ()  # which matrices go through memory of ours, and why
    explanation: Explanation | None = None  # what stays, what moves, and what limits the time; on rank 0
    warning: str = ""  # of a place that costs more than half of the time; empty if none does

    @property
    def median_s(self) -> float:
        """Median of the timed calls (s)."""
        return statistics.median(self.timing.samples_s)

    @property
    def min_s(self) -> float:
        """Shortest timed call (s)."""
        return min(self.timing.samples_s)

    @property
    def max_s(self) -> float:
        """Longest timed call (s)."""
        return max(self.timing.samples_s)

    @property
    def tflop_per_s(self) -> float:
        """Rate of the median call, 2mnk operations over its time (1e12 per second); 0 where nothing is multiplied."""
        operations = 2.0 * self.asked.m * self.asked.n * self.asked.k if self.asked.alpha != 0 else 0.0
        return operations / self.median_s / 1e12 if self.median_s > 0 else 0.0


def text(facts: Facts) -> str:
    """Return the report of one run, ending in a newline."""
    lines = [
        *_header(facts.about),
        line("problem", facts.asked.text),
        *(line("input", f"{one}; they spread to C as in any BLAS") for one in facts.about.nonfinite),
        line("plan", _plan(facts)),
        *_memory(facts.summary),
        *(line("staged", one) for one in facts.staged),
        *(explained(facts.explanation, facts.warning, in_chunks=facts.summary.chunks > 1) if facts.explanation else []),
        *_times(facts),
        *([line("trace", facts.trace)] if facts.trace else []),
        *_check(facts),
        "UNCHECKED" if facts.check is None else "PASS" if facts.check.passed else "FAIL",
    ]
    return "\n".join(lines) + "\n"


def _memory(plan: PlanSummary) -> list[str]:
    kinds = [("each device", plan.softbuf_bytes, plan.device_memory)] if plan.device_memory else []
    if any(plan.host_bytes):
        kinds.append(("host memory for copies", plan.host_bytes, plan.host_memory))
    return [
        line("memory", f"{_by_rank(taken)} of {what}, of {bytes_text(allowed)} allowed")
        for what, taken, allowed in kinds
    ]


def _by_rank(sizes: Sequence[int]) -> str:
    """Return sizes in the order of ranks; of many ranks the range."""
    texts = [bytes_text(size) for size in sizes]
    if len(set(texts)) == 1:
        return texts[0]
    return " | ".join(texts) if len(texts) <= _FEW_RANKS else f"{bytes_text(min(sizes))} to {bytes_text(max(sizes))}"


def to_json(facts: Facts) -> str:
    """
    Return the facts of one run as one JSON object, ending in a newline.

    Times are in seconds; `bytes` has one entry per kind of link. `passed`, `error` and `tolerance` are null without a
    check, and `error` and `tolerance` where they are not finite. `median_s`, `min_s`, `max_s` and `tflop_per_s` are
    null where nothing was measured. `cupy`, `cuda` and `driver` are null with the host backend.
    """
    about, plan, timing, check = facts.about, facts.summary, facts.timing, facts.check
    measured = ("median_s", "min_s", "max_s", "tflop_per_s")
    value = {
        **facts.asked.values("m", "n", "k", "dtype", "trans_a", "trans_b", "alpha", "beta", "place"),
        **fields_of(about, "backend", "ranks", "nodes"),
        "scheduler": plan.scheduler,
        "grid": f"{plan.grid[0]}x{plan.grid[1]}",
        **fields_of(plan, "tile", "tasks", "plan_s"),
        "first_call_s": timing.first_call_s,
        **(fields_of(facts, *measured) if timing.samples_s else dict.fromkeys(measured)),
        "bound_s": facts.bound.seconds,
        "predicted_s": plan.predicted_s,
        "bytes": dict(plan.bytes_by_link),
        "error": check and _finite(check.error),
        "tolerance": check and _finite(check.tolerance),
        "passed": check and check.passed,
        **fields_of(about, "device", "version"),
        # What a published result needs besides.
        "rms_error": check and _finite(check.rms_error),
        "relative": check and check.relative,
        "samples_s": list(timing.samples_s),
        "digest": plan.digest,
        "memory": {
            "softbuf_bytes": list(plan.softbuf_bytes),
            "device_memory": plan.device_memory,
            "host_bytes": list(plan.host_bytes),
            "host_memory": plan.host_memory,
        },
        **fields_of(plan, "splits", "how", "tried", "chunks"),
        "metric": facts.asked.metric,
        "machine": about.machine,
        "trace": facts.trace or None,
        "bound_formula": facts.bound.words,
        **fields_of(about, "command_line", "date", "backend_reason", "cores", "mpi"),
        **dict.fromkeys(("python", "numpy", "mpi4py", "blas", "cupy", "cuda", "driver")),
        **about.versions,
        "staged": list(facts.staged),
        "explanation": dataclasses.asdict(facts.explanation) if facts.explanation else None,
        "warning": facts.warning or None,
        "nonfinite_inputs": [dataclasses.asdict(one) for one in about.nonfinite],
        "check_detail": _detail(facts),
    }
    return json.dumps(value, indent=1, allow_nan=False) + "\n"


def explained(explanation: Explanation, warning: str, *, in_chunks: bool) -> list[str]:
    """Return the lines that say what a plan does, what limits it and, if a place costs most of its time, which."""
    of = "of the first chunk: " if in_chunks else ""
    lines = labelled("in short", [f"{of}{one}" for one in explanation.lines])
    return [*lines, *labelled("warning", [warning] * bool(warning))]


def _header(about: Circumstances) -> list[str]:
    entries = (
        ("version", f"uncut_mpi {about.version}"),
        ("command", about.command_line),
        ("date", about.date),
        ("host" if len(about.hosts) == 1 else "hosts", ", ".join(about.hosts)),
        ("devices", about.device),
        ("MPI", f"{about.mpi}; {about.where}"),
        ("backend", f"{about.backend}: {about.backend_reason}" if about.backend_reason else about.backend),
        ("software", ", ".join(_software(about.versions))),
        ("machine", about.machine),
    )
    return [f"# {label:<{LABEL_WIDTH - 2}} {content}" for label, content in entries]


def _software(versions: Mapping[str, str]) -> list[str]:
    """Return what there is, with its version; a BLAS has its name in it."""
    names = {"python": "Python ", "numpy": "numpy ", "blas": "", "cupy": "cupy ", "cuda": "CUDA ", "driver": "driver "}
    return [f"{prefix}{versions[name]}" for name, prefix in names.items() if name in versions]


def _plan(facts: Facts) -> str:
    plan = facts.summary
    moved = ", ".join(
        f"{bytes_text(size)} {_LINK_NAMES.get(link, link)}" for link, size in plan.bytes_by_link.items() if size
    )
    tried = f"fastest of {plan.tried} tried: " if plan.tried > 1 else ""
    aim = f" for the least {facts.asked.metric}" if facts.asked.metric != "time" else ""
    return (
        f"{tried}{plan.scheduler}{aim}, {plan.how}, {plan.tasks} tasks, "
        f"{moved or 'no bytes'} moved, planned in {time_text(plan.plan_s)}, digest {plan.digest[:16]}"
    )


def _times(facts: Facts) -> list[str]:
    """Return what was measured, or what the one product took where nothing was to be measured."""
    timing = facts.timing
    if not timing.samples_s:
        took = (
            f"{time_text(timing.first_call_s)}: planned and reserved in {time_text(timing.planned_s)}, multiplied in "
            f"{time_text(timing.call_s)} (slowest rank; one call, --repeat N measures)"
        )
        return [line("took", took)]
    least, median, most = (time_text(one) for one in (facts.min_s, facts.median_s, facts.max_s))
    calls = f"median {median}, min {least}, max {most} of {len(timing.samples_s)} (slowest rank)"
    four = f", of real operations {4 * facts.tflop_per_s:.4g}" if facts.asked.dtype.is_complex else ""
    formula = facts.bound.words
    if facts.bound.seconds > facts.min_s:  # a call that takes less shows that its rates were measured too low
        formula = f"{formula.rpartition(', ')[0]}, beaten: its rates were measured too low"
    basis = "by arrival times and compute" if facts.summary.scheduler == "uncut" else "by simulation"
    return [
        line("first call", time_text(timing.first_call_s)),
        line("calls", calls),
        line("rate", f"{facts.tflop_per_s:.4g} TFLOP/s (2mnk / median{four})"),
        line("predicted", _against(facts.summary.predicted_s, facts.median_s, basis)),
        line("bound", _against(facts.bound.seconds, facts.median_s, formula)),
    ]


def _against(expected_s: float, median_s: float, how: str) -> str:
    if expected_s <= 0 or median_s <= 0:
        return f"{time_text(expected_s)} ({how})"
    return f"{time_text(expected_s)} ({how}), {expected_s / median_s:.1%} of the median"


def _check(facts: Facts) -> list[str]:
    check = facts.check
    if check is None:
        return [line("check", _detail(facts) or "none")]
    of = f"of the largest value; RMS {check.rms_error:.3g} of the RMS of C" if check.relative else "(absolute)"
    return [line("check", f"error {check.error:.3g}, tolerance {check.tolerance:.3g} {of}"), line("", check.detail)]


def _detail(facts: Facts) -> str:
    m, n = facts.asked.m, facts.asked.n
    if facts.check is not None:
        return facts.check.detail
    return f"nothing to check: C is {m}×{n} and has no elements" if 0 in (m, n) else ""


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


def fields_of(value: object, *names: str) -> dict[str, Any]:
    """Return some fields of a value by their names."""
    return {name: getattr(value, name) for name in names}
