"""The main job: from a command line to a verified, reported product on all ranks."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
import shlex
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import uncut_mpi
from uncut_mpi.api.gemm_plan import GemmPlan, Trace
from uncut_mpi.api.matrix_files import MatrixFile, open_operands, output_order
from uncut_mpi.api.session import Session
from uncut_mpi.command import artifacts, nonfinite, report
from uncut_mpi.command.arguments import GemmArguments
from uncut_mpi.command.check import FULL_CHECK_LIMIT
from uncut_mpi.command.entry import Say
from uncut_mpi.command.planning import UNIFORM, costly_place, find_machine
from uncut_mpi.command.product import (
    Product,
    check_output,
    file_source,
    generated_sources,
    make_product,
    measure,
    reset_result,
    share_of,
    verify_product,
    write_result,
)
from uncut_mpi.command.sharers import Sharers
from uncut_mpi.command.streaming import Streamed, are_streamed
from uncut_mpi.errors import DataFileError, ParamError, agreed
from uncut_mpi.model.bounds import bound_of_files
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.places import Places
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.simulate import simulate
from uncut_mpi.segments import node_identity
from uncut_mpi.spmd.group import Group
from uncut_mpi.spmd.runtime import library_version
from uncut_mpi.units import bytes_text, time_text
from uncut_mpi.view.explain import Explanation, explain
from uncut_mpi.view.render import check_drawable, render
from uncut_mpi.view.timeline import Timeline

# A problem that shows something within seconds where nothing was asked for.
_DEFAULT_EDGE = {"cuda": 8192, "host": 1024}


def run(comm: Any, arguments: GemmArguments, words: Sequence[str], say: Say) -> bool:
    """Run the job, say what was done and return whether its checks passed, the same on every rank. Collective."""
    machine = _machine(comm, arguments)
    with Session(
        comm,
        **arguments.of_ranks,
        timeout_s=arguments.timeout_s,
        arrival_timeout_s=arguments.timeout_s,
        tune_products=arguments.tune_products,
        machine=machine,
    ) as session:
        with session.together("checking the placement"):
            arguments.place.check_ranks(session.size)
        with session.together("checking the output"):
            if session.rank == 0:
                artifacts.check_paths(
                    artifacts.written_by(arguments),
                    (arguments.a_path, arguments.b_path, arguments.c_path, arguments.machine),
                    elsewhere={"-o": arguments.out_path},
                )
                if arguments.trace is not None:
                    check_drawable(arguments.trace)
        product = _make(session, arguments)
        with product.streamed or contextlib.nullcontext():
            return _multiply(session, arguments, product, words, say)


def _multiply(session: Session, arguments: GemmArguments, product: Product, words: Sequence[str], say: Say) -> bool:
    """Multiply, say what was done, write the files and return whether checks passed."""
    about = _about(session, arguments, product, words, _nonfinite(session, arguments, product))
    facts, picture = _measure(session, arguments, product, about)
    if session.rank == 0:
        say(report.text(facts))  # first, so that it is printed whatever happens to the files
    if arguments.out_path is not None and (facts.check is None or facts.check.passed):
        write_result(session, product, arguments.out_path, overwrite=arguments.overwrite)
    with session.together("writing the facts"):
        if session.rank == 0:
            artifacts.write_file("--json", arguments.json, report.to_json(facts).encode())
            artifacts.write_file("--trace", arguments.trace, picture)
    return facts.check is None or facts.check.passed


def _machine(comm: Any, arguments: GemmArguments) -> Machine | None:
    """Return the machine that the command line names; None for what is there. Collective."""
    if arguments.machine is None:
        return None
    name = arguments.machine
    with Group(comm) as group:
        ranks = group.size if name == UNIFORM else None
        return Machine.from_json(group.from_root(lambda: find_machine(name, ranks).to_json()))


def _make(session: Session, arguments: GemmArguments) -> Product:
    """Make the product that the command line asks for."""
    a_path, b_path, out_path = arguments.a_path, arguments.b_path, arguments.out_path
    if a_path is None or b_path is None:  # there are both or none
        edge = _DEFAULT_EDGE.get(session.backend_name, _DEFAULT_EDGE["host"])
        m, n, k = (edge if extent is None else extent for extent in (arguments.m, arguments.n, arguments.k))
        dtype = arguments.dtype or DType.f64
        return make_product(session, arguments, (m, n, k), dtype, generated_sources(arguments, m, n, k), "F")
    opened: tuple[MatrixFile, MatrixFile, MatrixFile | None] | None = None
    with session.together("opening the matrix files"):
        if session.rank == 0:
            opened = open_operands(a_path, b_path, arguments.c_path, arguments.dtype)
            if out_path is not None:
                check_output(out_path, overwrite=arguments.overwrite)
            for name, path in (("A", a_path), ("B", b_path)):
                if out_path is not None and artifacts.is_same(out_path, path):
                    raise DataFileError(f"-o {out_path} is the file of {name}, which would be lost: name another file")
    a, b, c = session.gather_values(opened)[0]
    extents = _extents(arguments, a, b, c)
    sources = file_source(a), file_source(b), file_source(c) if c is not None and arguments.beta != 0 else None
    order = output_order(a, b, c)
    if are_streamed(session, arguments, (a, b, c), extents[:2]):
        if out_path is None:
            raise agreed(
                ParamError("these files are multiplied where they are, and C has to lie somewhere: add -o OUT.npy")
            )
        files = Streamed(session, arguments, (a, b, c), extents[:2], order)
        place = Places.parse("f,f,f")
        return Product(*extents, a.dtype, place, files.a, files.b, files.c, *files.values, streamed=files)
    return make_product(session, arguments, extents, a.dtype, sources, order)


def _nonfinite(session: Session, arguments: GemmArguments, product: Product) -> list[nonfinite.NonFinite]:
    """
    Return the NaN and infinity of the input files that are read. Collective.

    Raise DataFileError if there are some and the product is too large for a check that can tell where they belong.
    """
    if product.streamed is not None and not arguments.check:
        return []  # to look for them would take as long as to multiply
    there = []
    for name, path, matrix, factor in (
        ("A", arguments.a_path, product.host_a, arguments.alpha),
        ("B", arguments.b_path, product.host_b, arguments.alpha),
        ("C", arguments.c_path, product.first_c, arguments.beta),
    ):
        if path is not None and factor != 0:
            values = Sharers.of(session).array(matrix)
            mine = nonfinite.find(name, path, values, matrix.order, share_of(session, matrix))
            found = nonfinite.join(session.gather_values(mine))
            if found is not None:
                there.append(found)
    multiplied = product.m * product.n * product.k if arguments.alpha != 0 else 0
    if there and arguments.check and multiplied > FULL_CHECK_LIMIT:
        raise agreed(
            DataFileError(
                f"{'; '.join(map(str, there))}: a product of this size is verified by sums over its rows, for which "
                "there is no bound then; mend the files, or multiply without verification (--no-check)"
            )
        )
    return there


def _extents(arguments: GemmArguments, a: MatrixFile, b: MatrixFile, c: MatrixFile | None) -> tuple[int, int, int]:
    m, k = (a.rows, a.cols) if arguments.trans_a == "N" else (a.cols, a.rows)
    k_b, n = (b.rows, b.cols) if arguments.trans_b == "N" else (b.cols, b.rows)
    if k != k_b:
        raise ParamError(
            f"shapes do not fit: op(A) of {a.path} is {m}×{k}, op(B) of {b.path} is {k_b}×{n}; "
            "the columns of op(A) must equal the rows of op(B)"
        )
    if c is not None and (c.rows, c.cols) != (m, n):
        raise ParamError(f"shapes do not fit: C of {c.path} is {c.rows}×{c.cols}, the product is {m}×{n}")
    return m, n, k


def _measure(
    session: Session, arguments: GemmArguments, product: Product, about: report.Circumstances
) -> tuple[report.Facts, bytes]:
    """Return one plan's facts, and the trace of one more call as a picture."""
    reset_result(session, product)
    session.barrier()
    started = time.perf_counter()
    with session.plan(
        product.a,
        product.b,
        product.c,
        reads_c=arguments.beta != 0,
        trans_a=arguments.trans_a,
        trans_b=arguments.trans_b,
        scales_only=arguments.alpha == 0,
        options=arguments.options,
    ) as plan:
        planned_s = time.perf_counter() - started
        timing = measure(session, plan, arguments, planned_s, product)
        checked = arguments.check and 0 not in (product.m, product.n)  # else nothing could be right or wrong
        verdict = verify_product(session, product, arguments) if checked else None
        picture, shown = b"", ""
        if arguments.trace is not None:
            reset_result(session, product)
            trace = plan.trace(arguments.alpha, arguments.beta)
            # What this call left in C is what is written, so it has to be right as well.
            if verdict is not None and verdict.passed:
                verdict = verify_product(session, product, arguments)
            picture, shown = _draw_trace(session, plan, trace, arguments.trace)
        bound = bound_of_files(plan.problem, plan.placement, session.machine, product.place.in_files)
        explanation, warning = _explained(session, arguments, product, plan)
        ops, scalars = (arguments.trans_a, arguments.trans_b), (arguments.alpha, arguments.beta)
        extents = product.m, product.n, product.k
        asked = report.Asked(*extents, product.dtype, *ops, *scalars, str(product.place), arguments.options.metric)
        said = about, asked, plan.summary, timing, bound, verdict, shown, _staged(product, plan), explanation, warning
        return report.Facts(*said), picture


def _draw_trace(session: Session, plan: GemmPlan, trace: Trace, path: str) -> tuple[bytes, str]:
    """
    Draw the timelines of a call, predicted above measured, and say what they show. Collective.

    Returns
    -------
    tuple of (bytes, str)
        What goes into the file, and the file's name and the times, on rank 0; both empty elsewhere.
    """
    content, shown = b"", ""
    with session.together("drawing the trace"):
        if session.rank == 0:
            simulation = simulate(plan.schedule, session.machine)
            machine = session.machine
            predicted = Timeline.of(plan.schedule, simulation.start_s, simulation.end_s, "predicted", machine)
            measured = Timeline.of(plan.schedule, trace.start_s, trace.end_s, "measured", machine)
            content = render(path, [predicted, measured])
            times = f"predicted {time_text(predicted.seconds)}, measured {time_text(measured.seconds)}"
            nbytes, hidden = measured.moved
            of_it = (
                f"; {100 * hidden / nbytes:.0f} % of {bytes_text(nbytes)} moved while products ran" if nbytes else ""
            )
            idle = f"; devices idle for {_range(measured)} of the measured time, {_range(predicted)} expected"
            first = "the first chunk, " if plan.summary.chunks > 1 else ""
            shown = f"{path}: {first}{times}, task by task{of_it}{idle}"
    return content, shown


def _range(timeline: Timeline) -> str:
    """Return the least and the largest part of the time in which a device runs no product and no sum."""
    least, most = (f"{100 * share:.0f}" for share in (timeline.idle_share.min(), timeline.idle_share.max()))
    return f"{least} %" if least == most else f"{least} to {most} %"


def _explained(
    session: Session, arguments: GemmArguments, product: Product, plan: GemmPlan
) -> tuple[Explanation | None, str]:
    """Return what the plan does, and the warning of a place that costs most of its time; on rank 0."""
    if session.rank != 0:
        return None, ""
    explanation = explain(simulate(plan.schedule, session.machine))
    shape = product.m, product.n, product.k, product.dtype, arguments.trans_a, arguments.trans_b
    written = GemmProblem(*shape, reads_c=arguments.beta != 0, scales_only=arguments.alpha == 0)
    return explanation, costly_place(written, product.place, plan.summary.predicted_s, session.machine)


def _staged(product: Product, plan: GemmPlan) -> list[str]:
    """Return which matrices go through memory of ours, and why."""
    if product.streamed is not None:
        return [f"{', '.join(product.streamed.paths)} stay on the disk and go through host memory"]
    said = []
    for name, matrix in (("A", product.a), ("B", product.b), ("C", product.c)):
        if name in plan.summary.staged:
            why = matrix.info.obstacle
            why = f"which its owner alone can use: {why}" if why else "of which parts are stored in another order"
            said.append(f"{name}, {why}")
    return said


def _about(
    session: Session,
    arguments: GemmArguments,
    product: Product,
    words: Sequence[str],
    found: Sequence[nonfinite.NonFinite],
) -> report.Circumstances:
    where = session.gather_values((platform.node(), node_identity(), os.sched_getaffinity(0)))
    return report.Circumstances(
        version=uncut_mpi.__version__,
        command_line=shlex.join(["python", "-m", "uncut_mpi.gemm", *words]),
        date=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        hosts=tuple(dict.fromkeys(host for host, *_ in where)),
        devices=session.device_names,
        cores=len({(node, core) for _, node, cores in where for core in cores}),
        mpi=library_version(),
        versions={
            "python": platform.python_version(),
            "numpy": np.__version__,
            "mpi4py": importlib.metadata.version("mpi4py"),
            **session.versions,
        },
        ranks=session.size,
        nodes=session.machine.num_nodes,
        backend=session.backend_name,
        backend_reason=session.backend_reason
        + ("; ranks share a GPU, which is slow" if session.devices_shared else "")
        + ("; --tune-products is for GPUs alone" if arguments.tune_products and session.backend_name != "cuda" else ""),
        machine=session.machine.name,
        nonfinite=found,
    )
