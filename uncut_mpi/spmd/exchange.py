"""What ranks hand each other besides arguments: schedules, handles of memory, shared host memory."""

from __future__ import annotations

from uncut_mpi.errors import RankMismatchError, TopologyError, agreed
from uncut_mpi.segments import Segment
from uncut_mpi.spmd.agreement import by_rank, collective_result
from uncut_mpi.spmd.group import Group


def exchange_handles(group: Group, handle: bytes, timeout_s: float | None = None) -> list[bytes]:
    """
    Give an opaque handle to all ranks. Collective.

    Parameters
    ----------
    handle : bytes
        Of any length on each rank; may be empty.

    Returns
    -------
    list of bytes
        That of every rank.
    """
    return group.allgather_variable(handle, "exchanging handles", timeout_s)


def shared_segment(
    group: Group, nbytes: int, purpose: str, *, use_file: bool = False, timeout_s: float | None = None
) -> Segment:
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
    use_file : bool, default False
        Use a file in ``/dev/shm`` even where anonymous memory can be had.

    Raises
    ------
    CapacityError
        On all ranks, if one node has too little memory. Nothing is left.
    RankMismatchError
        If `nbytes` differs between ranks.
    TopologyError
        On all ranks, if one cannot map it.
    """
    try:
        return _share(group, nbytes, purpose, use_file, timeout_s)
    except _CannotOpenError:
        # The system keeps processes from looking at each other's descriptors; a file has a name.
        try:
            return _share(group, nbytes, purpose, True, timeout_s)
        except _CannotOpenError as error:
            raise agreed(TopologyError(str(error))) from None


class _CannotOpenError(Exception):
    """A peer could not map what its node's first rank created; raised on all ranks."""


def _share(group: Group, nbytes: int, purpose: str, use_file: bool, timeout_s: float | None) -> Segment:
    segment: Segment | None = None
    error: BaseException | None = None
    if group.local_rank == 0:
        try:
            segment = Segment.create(nbytes, purpose, use_file=use_file, interleave=True)
        except BaseException as caught:  # also an interrupt: the other ranks wait in the agreement below
            error = caught
    try:
        facts = group.allgather_objects(
            (segment.handle if segment else b"", nbytes, error is not None), f"sharing memory for {purpose}", timeout_s
        )
        if any(fact[2] for fact in facts):
            collective_result(group, error, f"sharing memory for {purpose}", timeout_s)
        if any(fact[1] != nbytes for fact in facts):
            raise agreed(
                RankMismatchError(
                    f"ranks asked for different sizes of {purpose} (bytes): {by_rank([fact[1] for fact in facts])}; "
                    "pass the same on every rank"
                )
            )
        if segment is None:
            leader = group.node_of.index(group.node)
            try:
                segment = Segment.open(facts[leader][0])
            except BaseException as caught:  # also an interrupt: the other ranks wait in the agreement below
                error = caught
        _agree_opened(group, error, purpose, timeout_s)
        if segment is None:
            raise TopologyError(f"no rank made shared memory for {purpose} on node {group.node}")
    except BaseException:
        if segment is not None:
            segment.close()
        raise
    segment.unlink()
    return segment


def _agree_opened(group: Group, error: BaseException | None, purpose: str, timeout_s: float | None) -> None:
    try:
        collective_result(group, error, f"mapping the shared memory of {purpose}", timeout_s)
    except TopologyError as refused:
        raise _CannotOpenError(str(refused)) from refused
