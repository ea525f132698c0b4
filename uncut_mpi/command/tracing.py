"""One more call of a measured plan, task by task, and its picture."""

from __future__ import annotations

from uncut_mpi.api.gemm_plan import GemmPlan, Trace
from uncut_mpi.api.session import Session
from uncut_mpi.planning.simulate import simulate
from uncut_mpi.units import bytes_text, time_text
from uncut_mpi.view.render import render
from uncut_mpi.view.timeline import Timeline


def draw_trace(session: Session, plan: GemmPlan, trace: Trace, path: str) -> tuple[bytes, str]:
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
            machine = session.machine.name
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
