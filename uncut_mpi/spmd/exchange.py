"""Host memory that ranks share."""

from __future__ import annotations

from uncut_mpi.errors import TopologyError
from uncut_mpi.segments import Segment
from uncut_mpi.spmd.agreement import collective
from uncut_mpi.spmd.group import Group


def shared_segment(group: Group, nbytes: int, purpose: str, *, timeout_s: float | None = None) -> Segment:
    """
    Make a segment that every rank of a node maps; one per node. Collective.

    The first rank of each node creates it and withdraws its name once all have mapped it, so that
    nothing is left behind however the job ends. Its pages are spread over the node's memory (NUMA).

    Parameters
    ----------
    nbytes : int
        The same on all ranks.
    purpose : str
        What it is for, as an error message calls it.

    Raises
    ------
    CapacityError
        On all ranks, if one node has too little memory. Nothing is left.
    TopologyError
        On all ranks, if one cannot map it.
    """
    segment = segment_of(group, group.node, nbytes, purpose, timeout_s=timeout_s)
    assert segment is not None
    return segment


def segment_of(
    group: Group, node: int, nbytes: int, purpose: str, use_file: bool = False, timeout_s: float | None = None
) -> Segment | None:
    """
    Make a segment as `shared_segment`, where `node` is this rank's own: None elsewhere. Collective.

    It is another one on each node that any of its ranks names; a file, or anonymous memory where that can be had.
    """
    segment: Segment | None = None
    try:
        with collective(group, f"sharing memory for {purpose}", timeout_s):
            if group.local_rank == 0 and node == group.node:
                segment = Segment.create(nbytes, purpose, use_file=use_file, interleave=True)
        handles = group.allgather_objects(segment and segment.handle, f"sharing memory for {purpose}", timeout_s)
        with collective(group, f"mapping the shared memory of {purpose}", timeout_s):
            if node == group.node:
                segment = segment or Segment.open(handles[group.node_of.index(node)])
    except BaseException as error:
        if segment is not None:
            segment.close()
        if use_file or not isinstance(error, TopologyError):
            raise
        # The system keeps processes from looking at each other's descriptors; a file has a name.
        return segment_of(group, node, nbytes, purpose, True, timeout_s)
    if segment is not None:
        segment.unlink()
    return segment
