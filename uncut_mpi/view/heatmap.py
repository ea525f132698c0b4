"""How many bytes went over each link, coloured by the link's bandwidth."""

from __future__ import annotations

import numpy as np

from uncut_mpi.errors import ParamError
from uncut_mpi.model.arguments import counted
from uncut_mpi.model.locations import end_name
from uncut_mpi.model.machine import Machine
from uncut_mpi.planning.schedule import Schedule
from uncut_mpi.units import bytes_text
from uncut_mpi.view.figure import import_figure, to_png
from uncut_mpi.view.parts import title_of


def draw_transfers(schedule: Schedule, machine: Machine) -> bytes:
    """
    Return a PNG of what a schedule moves over every link: in each cell the bytes, its colour the bandwidth.

    Parameters
    ----------
    schedule : Schedule
        Whose copies are added up per source and destination, the host last.
    machine : Machine
        Whose bandwidths colour the cells.

    Raises
    ------
    ParamError
        If the machine has another number of ranks, or matplotlib is not installed.
    """
    if machine.num_ranks != schedule.num_ranks:
        raise ParamError(
            f"a schedule of {counted(schedule.num_ranks, 'rank')} on machine {machine.name} "
            f"of {counted(machine.num_ranks, 'rank')}: use the machine that it was planned for"
        )
    size = len(machine.bandwidth_gb_per_s)
    moved = np.zeros((size, size), np.int64)
    copies = schedule.copies()
    np.add.at(moved, (copies[:, 1], copies[:, 2]), copies[:, 3])
    edge = 2.2 + 0.72 * size
    figure = import_figure()(figsize=(max(7.5, edge + 1.2), edge), dpi=120, layout="constrained")
    axis = figure.subplots()
    bandwidth = np.array(machine.bandwidth_gb_per_s)
    np.fill_diagonal(bandwidth, np.nan)  # a copy within a device uses no link
    image = axis.imshow(bandwidth, cmap="viridis", vmin=0.0, aspect="auto")  # few ranks fill the width too
    figure.colorbar(image, ax=axis, label="colour: bandwidth of the link, GB/s")
    names = [end_name(schedule.locations, end) for end in range(size)]
    for source, destination in np.ndindex(size, size):
        nbytes = int(moved[source, destination])
        if source == destination and nbytes == 0:
            continue
        shade = bandwidth[source, destination]
        dark = np.isfinite(shade) and shade < 0.6 * np.nanmax(bandwidth)
        colour = "white" if dark else "black"
        axis.text(destination, source, bytes_text(nbytes), ha="center", va="center", color=colour, fontsize=8.5)
    axis.set_xticks(range(size), names)
    axis.set_yticks(range(size), names)
    axis.set_xlabel("destination")
    axis.set_ylabel("source")
    axis.set_title(f"numbers: bytes moved, {bytes_text(int(moved.sum()))} in all", fontsize="medium")
    figure.suptitle(title_of(schedule, machine).replace("; scheduler", "\nscheduler"), fontsize="medium")
    return to_png(figure)
