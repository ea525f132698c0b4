"""How many transfers went over each link, coloured by the link's bandwidth."""

from __future__ import annotations

import numpy as np

from uncut_mpi.errors import ParamError
from uncut_mpi.model.machine import Machine
from uncut_mpi.view.figure import import_figure, to_png


def draw_transfers(transfers: np.ndarray, machine: Machine) -> bytes:
    """
    Return a PNG of the number of transfers over every link: in each cell the count, its colour the bandwidth.

    Parameters
    ----------
    transfers : ndarray of int, shape (num_ranks+1, num_ranks+1)
        Copies per [source, destination], the host last.
    machine : Machine
        Whose bandwidths colour the cells.

    Raises
    ------
    ParamError
        If the machine has another number of ranks, or matplotlib is not installed.
    """
    size = machine.num_ranks + 1
    if transfers.shape != (size, size):
        raise ParamError(
            f"transfers of shape {transfers.shape} on machine {machine.name} of {machine.num_ranks} ranks: "
            f"one row and one column per rank and one for the host are needed, {(size, size)}"
        )
    edge = 1.6 + 0.55 * size
    figure = import_figure()(figsize=(edge + 1.2, edge), dpi=120, layout="constrained")
    axis = figure.subplots()
    bandwidth = np.array(machine.bandwidth_gb_per_s)
    np.fill_diagonal(bandwidth, np.nan)  # a copy within a device uses no link
    image = axis.imshow(bandwidth, cmap="viridis", vmin=0.0)
    figure.colorbar(image, ax=axis, label="bandwidth, GB/s")
    names = [*map(str, range(size - 1)), "host"]
    for source, destination in np.ndindex(size, size):
        count = int(transfers[source, destination])
        if source == destination and count == 0:
            continue
        shade = bandwidth[source, destination]
        dark = np.isfinite(shade) and shade < 0.6 * np.nanmax(bandwidth)
        axis.text(destination, source, str(count), ha="center", va="center", color="white" if dark else "black")
    axis.set_xticks(range(size), names)
    axis.set_yticks(range(size), names)
    axis.set_xlabel("destination")
    axis.set_ylabel("source")
    axis.set_title(f"{int(transfers.sum())} transfers", fontsize="medium")
    return to_png(figure)
