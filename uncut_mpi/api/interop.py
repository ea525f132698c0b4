"""
Arrays of PyTorch and JAX that are dealt to processes: what lies where, and the same of a matrix. Local.

Both libraries know a mesh of devices and which of its dimensions cut which of an array's. They are recognised by their
attributes, and loaded only by who passes a mesh of theirs, which has loaded them.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from uncut_mpi.api.grips import shows, take
from uncut_mpi.api.matrix import Matrix
from uncut_mpi.api.stored import shown_of
from uncut_mpi.device.exported import Shown, translated
from uncut_mpi.device.interface import Backend
from uncut_mpi.errors import ParamError, UncutError, named
from uncut_mpi.instead import dimensions_text
from uncut_mpi.model.arguments import counted, type_text
from uncut_mpi.model.layout import Layout
from uncut_mpi.model.parts import Rectangle
from uncut_mpi.spmd import agreement

Place: TypeAlias = tuple[int, ...]
"""Which device of a mesh: its coordinates, or its number alone."""

Cuts: TypeAlias = tuple[Literal[0, 1] | None, ...]
"""For each dimension of a mesh what it cuts of a matrix: 0 rows, 1 columns, None nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sharded:
    """What this rank has of an array that is dealt to processes."""

    shape: tuple[int, int]  # of all of it
    arrays: dict[Rectangle, Any]  # its parts here, by their rows and columns; one of several replicas
    places: list[Place]  # the devices of the mesh that are this rank's
    num_places: int  # how many devices the mesh has
    dealt: str  # how it is dealt, as its library says it


# -- rules ---------------------------------------------------------------------------------------


def rectangle_of(shape: tuple[int, int], mesh: Sequence[int], cuts: Cuts, place: Place) -> Rectangle:
    """
    Return the rows and columns that one device of a mesh has.

    As `torch.chunk` cuts: parts of ceil(extent / count) rows or columns until none are left, so that the last may be
    smaller or empty. Dimensions of the mesh cut one after another. JAX cuts alike where all parts are equal.
    """
    extents = [(0, shape[0]), (0, shape[1])]
    for count, cut, at in zip(mesh, cuts, place, strict=True):
        if cut is not None:
            start, stop = extents[cut]
            each = -(-(stop - start) // count)
            extents[cut] = min(start + at * each, stop), min(start + (at + 1) * each, stop)
    return extents[0], extents[1]


def holders_of(places: Sequence[Sequence[Place]], num_places: int) -> dict[Place, int]:
    """Return which rank has each device of a mesh; ParamError if none has one, or several say that it is theirs."""
    found = {place: rank for rank, ones in enumerate(places) for place in ones}
    if len(found) == num_places == sum(map(len, places)):
        return found
    texts = [" and ".join(map(str, ones)) or "none" for ones in places]
    raise ParamError(
        f"a mesh of {counted(num_places, 'device')}, of which ranks of this session have {agreement.by_rank(texts)}: "
        "pass a mesh of which each device is one rank's, of processes that are ranks of this session "
        "(torch.distributed.init_process_group or jax.distributed.initialize, with the session's ranks)"
    )


def layout_of_parts(parts: Sequence[Rectangle | None], shape: tuple[int, int]) -> Layout | None:
    """Return the layout by which ranks have these rows and columns, or nothing; None if none does."""
    by_place = sorted((one, rank) for rank, one in enumerate(parts) if one is not None)
    found, ranks = [one for one, _ in by_place], [rank for _, rank in by_place]
    named = None if ranks == [*range(len(parts))] else ranks
    every = (0, shape[0]), (0, shape[1])
    heights, widths = ([stop - start for start, stop in extents] for extents in zip(*found, strict=True))
    if all(cols == every[1] for _, cols in found) and sum(heights) == shape[0]:
        return Layout.rows(heights, ranks=named)
    if all(rows == every[0] for rows, _ in found) and sum(widths) == shape[1]:
        return Layout.cols(widths, ranks=named)
    if all(one == every for one in found):
        return Layout.replicated(ranks=named)
    full = [(one, rank) for one, rank in by_place if has_elements(one)]
    blocks = [sorted({one[axis] for one, _ in full}) for axis in (0, 1)]
    if len({one for one, _ in full}) == len(full):
        counts = ([stop - start for start, stop in extents] for extents in blocks)
        full_ranks = [rank for _, rank in full]
        return Layout.blocks(*counts, ranks=None if full_ranks == [*range(len(parts))] else full_ranks)
    return None


def cuts_of(
    what: str,
    dealt: Layout | None,
    shape: tuple[int, int],
    parts: Sequence[Sequence[Rectangle]],
    mesh: Sequence[int],
    holders: Mapping[Place, int],
    *,
    even: bool,
) -> Cuts:
    """
    Return what the dimensions of a mesh cut so that each rank has its parts of a matrix.

    Parameters
    ----------
    what : str
        The matrix, and what it is to be, for the error.
    dealt : Layout or None
        How it is dealt.
    parts : sequence of sequence of ((int, int), (int, int))
        Each rank's, those with elements.
    even : bool
        Whether all parts must be of one shape.

    Raises
    ------
    ParamError
        If nothing does; it names a layout that would do, of the same kind if there is one.
    """
    others: list[Layout] = []
    options: list[tuple[Literal[0, 1] | None, ...]] = [
        (0, 1, None) if at % 2 == 0 else (1, 0, None) for at in range(len(mesh))
    ]
    for cuts in itertools.product(*options):
        found = {rank: rectangle_of(shape, mesh, cuts, place) for place, rank in holders.items()}
        if even and len({tuple(stop - start for start, stop in one) for one in found.values()}) > 1:
            continue
        if all([one] * has_elements(one) == list(parts[rank]) for rank, one in found.items()):
            return cuts
        layout = layout_of_parts([found.get(rank) for rank in range(len(parts))], shape)
        others += [] if layout is None else [layout]
    kind, layout_text = ("", "single parts") if dealt is None else (dealt.kind, f"layout {dealt}")
    best = next((one for one in others if one.kind == kind), others[0])
    rule = "parts of one shape" if even else "torch.chunk"
    raise ParamError(
        f"{what} over a mesh of {'×'.join(map(str, mesh))}, and {layout_text} is none that it can have by its rule "
        f"({rule}, in the order of the mesh): pass session.redistribute(matrix, Layout.parse('{best}'))"
    )


def has_elements(rectangle: Rectangle) -> bool:
    """Return whether there is anything in some rows and columns."""
    return all(start < stop for start, stop in rectangle)


def parts_of_rank(matrix: Matrix) -> list[Rectangle]:
    """
    Return this rank's parts that have elements, each from its first row and column to its last.

    Parts with gaps, as of cyclic layouts, overlap so. Parts by a mesh are disjoint or the same, and are none of these.
    """
    pairs = [matrix.local_indices] if matrix.layout is not None else matrix.local_indices
    full = [pair for pair in pairs if all(map(len, pair))]
    return [((int(rows[0]), int(rows[-1]) + 1), (int(cols[0]), int(cols[-1]) + 1)) for rows, cols in full]


# -- what other libraries have -------------------------------------------------------------------


def of_dtensor(given: Any) -> Sharded:
    """
    Return what this rank has of a DTensor.

    Raise ParamError if it is no matrix, a sum that is not formed yet, dealt in a way of its own, or records a gradient.
    """
    if not all(shows(given, name) for name in ("device_mesh", "placements", "to_local")):
        raise ParamError(
            f"{type_text(given)} is no DTensor: pass one of torch.distributed.tensor; session.distribute takes each "
            "rank's own tensor"
        )
    with translated(given):
        shape = _two_of(given)
        if given.requires_grad:
            raise ParamError("a DTensor requires a gradient, of which nothing would be recorded: pass x.detach()")
        mesh = TorchMesh(given.device_mesh)
        text = ", ".join(map(repr, given.placements))
        for at, placement in enumerate(given.placements):
            if placement.is_partial():
                raise ParamError(
                    f"the DTensor is {placement!r} over dimension {at} of its mesh, a sum that is not formed yet: pass "
                    "x.redistribute(placements=[...]) with Shard(0), Shard(1) or Replicate() there"
                )
            if not placement.is_replicate() and type(placement).__name__ != "Shard":
                raise ParamError(
                    f"the DTensor is dealt as {placement!r} over dimension {at} of its mesh: pass "
                    "x.redistribute(placements=[...]) with Shard(0), Shard(1) or Replicate() there"
                )
        order = getattr(getattr(given, "_spec", None), "shard_order", None) or ()
        if any(list(entry.mesh_dims) != sorted(entry.mesh_dims) for entry in order):
            raise ParamError(
                f"the DTensor is cut in the order {order} of its mesh's dimensions: pass one that is cut by the first "
                "of them first"
            )
        cuts: Cuts = tuple(None if one.is_replicate() else one.dim % 2 for one in given.placements)
        local = given.to_local()
        local = getattr(local, "wait", lambda: local)()  # of a collective call of torch that is under way
        places, extents = mesh.places, mesh.shape
    arrays = {rectangle_of(shape, extents, cuts, one): local for one in places}
    return Sharded(shape, arrays, places, int(np.prod(extents)), f"{text} over {'×'.join(map(str, extents))}")


def of_jax(given: Any) -> Sharded:
    """Return what this rank has of an array of JAX, when it is computed; ParamError if it is none, or no matrix."""
    if not all(shows(given, name) for name in ("addressable_shards", "sharding", "block_until_ready")):
        raise ParamError(
            f"{type_text(given)} is no array of JAX: pass one; session.distribute takes each rank's own array of others"
        )
    with translated(given):
        shape = _two_of(given)
        given.block_until_ready()
        arrays, places = {}, list[Place]()
        for shard in given.addressable_shards:
            rows, cols = (one.indices(extent)[:2] for one, extent in zip(shard.index, shape, strict=True))
            arrays[rows, cols] = shard.data
            places.append((int(shard.device.id),))
        sharding = given.sharding
        return Sharded(
            shape, arrays, places, len(sharding.device_set), str(getattr(sharding, "spec", type(sharding).__name__))
        )


def _two_of(given: Any) -> tuple[int, int]:
    shape = tuple(map(int, given.shape))
    if len(shape) != 2:
        raise ParamError(f"{type_text(given)} was given that has {dimensions_text(len(shape))}")
    return shape[0], shape[1]


# -- what they are given -------------------------------------------------------------------------


class TorchMesh:
    """
    A `DeviceMesh` of torch, to which a matrix is shown as a DTensor.

    Attributes
    ----------
    shape : tuple of int
        Devices along each dimension.
    places : list of tuple of int
        Those of this rank.
    """

    even, kind = False, "DTensor"

    def __init__(self, mesh: Any) -> None:
        if not all(shows(mesh, name) for name in ("get_coordinate", "device_type", "shape")):
            raise ParamError(f"mesh is {type_text(mesh)}: pass a DeviceMesh of torch (init_device_mesh)")
        place = mesh.get_coordinate()
        self.mesh, self.shape = mesh, tuple(map(int, mesh.shape))
        self.places: list[Place] = [] if place is None else [tuple(map(int, place))]

    def shown(self, matrix: Matrix, cuts: Cuts, own: Sequence[Rectangle], backend: Backend) -> Any:
        """Return a DTensor over the memory of a matrix."""
        torch, of = importlib.import_module("torch"), importlib.import_module("torch.distributed.tensor")
        local = torch.empty(_extents(own), dtype=getattr(torch, matrix.dtype.numpy.name), device=self.mesh.device_type)
        if local.numel():
            local = _part_of(matrix)
            if not isinstance(local, torch.Tensor):
                local = torch.from_dlpack(memory_of(matrix, local, backend, writes=True))
        if local.device.type != self.mesh.device_type:
            raise ParamError(
                f"{matrix} lies on {local.device}, the mesh is of {self.mesh.device_type}: pass a mesh of the former "
                "kind, or session.redistribute(matrix, layout, memory=...)"
            )
        placements = [of.Replicate() if cut is None else of.Shard(cut) for cut in cuts]
        rows, cols = matrix.shape
        stride = (cols, 1) if matrix.order == "C" else (1, rows)
        shape = torch.Size((rows, cols))
        return of.DTensor.from_local(local, self.mesh, placements, run_check=False, shape=shape, stride=stride)


class JaxMesh:
    """A `Mesh` of JAX, over which a matrix is shown as an array; attributes as of `TorchMesh`."""

    even, kind = True, "array of JAX"

    def __init__(self, mesh: Any) -> None:
        if not all(shows(mesh, name) for name in ("devices", "axis_names", "local_devices")):
            raise ParamError(f"mesh is {type_text(mesh)}: pass a Mesh of devices of JAX (jax.make_mesh)")
        local = mesh.local_devices
        self.mesh, self.shape = mesh, tuple(mesh.devices.shape)
        self.places: list[Place] = [at for at, device in np.ndenumerate(mesh.devices) if device in local]

    def shown(self, matrix: Matrix, cuts: Cuts, own: Sequence[Rectangle], backend: Backend) -> Any:
        """Return an array of JAX over the memory of a matrix."""
        jax = importlib.import_module("jax")
        axes = [[name for name, cut in zip(self.mesh.axis_names, cuts, strict=True) if cut == axis] for axis in (0, 1)]
        spec = (tuple(names) if len(names) > 1 else names[0] if names else None for names in axes)
        sharding = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec(*spec))
        arrays = []
        for place in self.places:
            local: Any = jax.device_put(np.empty(_extents(own), matrix.dtype.numpy), self.mesh.devices[place])
            if local.size:
                local = _part_of(matrix)
                if not isinstance(local, jax.Array):
                    memory = memory_of(matrix, local, backend, writes=False)
                    local = jax.dlpack.from_dlpack(memory, copy=False)
                    if local.unsafe_buffer_pointer() != memory.address:
                        raise ParamError(f"JAX made a copy, of {local.dtype}: set jax_enable_x64 for 64 bits")
            arrays.append(local)
        typed = {} if arrays else {"dtype": matrix.dtype.numpy}  # which older versions do not take
        return jax.make_array_from_single_device_arrays(matrix.shape, sharding, arrays, **typed)


def _extents(own: Sequence[Rectangle]) -> tuple[int, ...]:
    """Return rows and columns of what a rank has on its one device of a mesh, or has not."""
    return tuple(stop - start for start, stop in own[0]) if own else (0, 0)


def _part_of(matrix: Matrix) -> Any:
    """Return this rank's only array of a matrix that has elements."""
    if matrix.layout is not None:
        return matrix.arrays_here()[0]
    return next(one for one in matrix.arrays_here() if 0 not in one.shape)


def memory_of(matrix: Matrix, local: Any, backend: Backend, *, writes: bool) -> Shown:
    """Return an array of a matrix for other libraries, or raise ParamError where they can write it and must not."""
    taken = take(local, backend)
    if writes and not taken.writeable:
        raise ParamError(f"{matrix} is read-only here, and what is made of it could be written: show a copy of it")
    return shown_of(taken.array)


def show(matrix: Matrix, mesh: TorchMesh | JaxMesh, cuts: Cuts, own: Sequence[Rectangle], backend: Backend) -> Any:
    """Return an array of another library over the memory of a matrix; ParamError if that would be a copy."""
    try:
        return mesh.shown(matrix, cuts, own, backend)
    except UncutError:
        raise
    except Exception as error:
        raise ParamError(
            f"{matrix} cannot be a {mesh.kind} where it is ({named(error)}): use memory without gaps, "
            "on the host from a multiple of 64 bytes on, as session.empty makes it"
        ) from error
