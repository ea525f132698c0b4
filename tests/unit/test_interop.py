"""The rules by which PyTorch and JAX deal arrays to processes, told by what looks like theirs: neither is needed."""

from __future__ import annotations

import itertools
import subprocess
import sys
import types

import numpy as np
import pytest

from uncut_mpi import Layout, ParamError
from uncut_mpi.api.interop import (
    JaxMesh,
    TorchMesh,
    cuts_of,
    holders_of,
    layout_of_parts,
    of_dtensor,
    of_jax,
    rectangle_of,
)


class Placement:
    """As torch's: what it is says its class, and two questions."""

    def __init__(self, dim=None):
        self.dim = dim

    def __repr__(self):
        return f"{type(self).__name__}({'' if self.dim is None else self.dim})"

    def is_partial(self):
        return isinstance(self, Partial)

    def is_replicate(self):
        return isinstance(self, Replicate)


class Shard(Placement):
    pass


class _StridedShard(Placement):
    pass


class Replicate(Placement):
    pass


class Partial(Placement):
    pass


class _MaskPartial(Partial):
    pass


class Mesh:
    """As a `DeviceMesh`."""

    device_type = "cpu"

    def __init__(self, shape, place):
        self.shape, self.place = shape, place

    def get_coordinate(self):
        return self.place


def dtensor(placements, place, mesh=(2,), shape=(5, 4), **words):
    """As a DTensor."""
    found = types.SimpleNamespace(
        placements=tuple(placements), device_mesh=Mesh(mesh, place), shape=shape, requires_grad=False, **words
    )
    found.to_local = lambda: found.local if hasattr(found, "local") else np.zeros((1, 1))
    return found


# -- who has what --------------------------------------------------------------------------------


@pytest.mark.parametrize("extent", range(12))
@pytest.mark.parametrize("count", range(1, 6))
def test_parts_are_those_of_torchs_chunk(extent, count):
    whole, each = np.arange(extent), -(-extent // count)
    for at in range(count):
        (first, last), cols = rectangle_of((extent, 3), (count,), (0,), (at,))
        assert whole[first:last].tolist() == whole[at * each :][:each].tolist()
        assert cols == (0, 3)
    assert (first, last) == (min(extent, at * each), extent)  # what is empty is at the end


def test_dimensions_of_a_mesh_cut_one_after_another():
    mesh = (2, 3)
    found = {place: rectangle_of((11, 9), mesh, (0, 0), place) for place in np.ndindex(mesh)}
    # 11 rows are 6 and 5, and these are 2, 2, 2 and 2, 2, 1.
    assert [rows for rows, _ in found.values()] == [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10), (10, 11)]
    assert rectangle_of((11, 9), mesh, (1, None), (1, 2)) == ((0, 11), (5, 9))


@pytest.mark.parametrize(
    ("cuts", "mesh", "shape", "layout"),
    [
        ((0,), (4,), (5, 3), Layout.rows([2, 2, 1, 0])),
        ((1,), (4,), (3, 9), Layout.cols([3, 3, 3, 0])),
        ((None,), (4,), (3, 9), Layout.replicated()),
        ((0, 1), (2, 2), (5, 3), Layout.blocks([3, 2], [2, 1])),
        ((1, 0), (2, 2), (5, 3), Layout.blocks([3, 2], [2, 1], ranks=[0, 2, 1, 3])),
        ((0, 0), (2, 2), (7, 3), Layout.rows([2, 2, 2, 1])),
        ((0, 1), (4, 2), (2, 2), Layout.blocks([1, 1], [1, 1], ranks=[0, 1, 2, 3])),
        ((0, None), (2, 2), (5, 3), None),
    ],
    ids=str,
)
def test_parts_are_a_layout_where_there_is_one(cuts, mesh, shape, layout):
    parts = [rectangle_of(shape, mesh, cuts, place) for place in np.ndindex(mesh)]
    found = layout_of_parts(parts, shape)
    assert found == layout
    if found is not None:
        full = [one if all(start < stop for start, stop in one) else None for one in parts]
        dealt = [
            one if all(start < stop for start, stop in one) else None for one in found.rectangles(shape, len(parts))
        ]
        assert dealt == full
    assert layout_of_parts([None, *parts], shape) in (
        layout and Layout(layout.kind, layout.row_counts, layout.col_counts,
                          tuple(1 + rank for rank in layout.ranks or range(len(parts)))),
    )  # fmt: skip


def test_each_device_of_a_mesh_is_one_ranks():
    assert holders_of([[(1,)], [], [(0,)]], 2) == {(1,): 0, (0,): 2}
    for places, words in (
        ([[(0,)], [(0,)]], "1 device, of which ranks of this session have \\(0,\\) on ranks 0-1"),
        ([[(0,)], []], "2 devices, of which ranks of this session have \\(0,\\) on rank 0, none on rank 1"),
        ([[(0,)], [(0,)]], "2 devices"),
    ):
        with pytest.raises(ParamError, match=words):
            holders_of(places, 2 if words.startswith("2") else 1)


def parts_by(layout, shape, size):
    return [[one] if all(a < b for a, b in one) else [] for one in layout.rectangles(shape, size)]


@pytest.mark.parametrize("mesh", [(4,), (2, 2)])
@pytest.mark.parametrize("even", [False, True])
def test_what_a_mesh_deals_is_found_again(mesh, even):
    shape = (8, 12) if even else (7, 5)
    holders = {place: rank for rank, place in enumerate(np.ndindex(mesh))}
    for cuts in itertools.product((0, 1, None), repeat=len(mesh)):
        found = [rectangle_of(shape, mesh, cuts, place) for place in holders]
        parts = [[one] if all(start < stop for start, stop in one) else [] for one in found]
        assert cuts_of("It", None, shape, parts, mesh, holders, even=even) == cuts


@pytest.mark.parametrize(
    ("layout", "even", "suggested"),
    [
        (Layout.rows([1, 6]), False, "rows(4,3)"),
        (Layout.cols([1, 7]), False, "cols(4,4)"),
        (Layout.whole(1), False, "rows(4,3)"),
        (Layout.replicated(ranks=[0]), False, "replicated"),
        (Layout.rows([4, 3]), True, "cols(4,4)"),
    ],
    ids=str,
)
def test_an_error_names_a_layout_that_would_do(layout, even, suggested):
    shape = (7, 8)
    with pytest.raises(ParamError, match=r"^It is over a mesh of 2, and layout ") as raised:
        cuts_of("It is", layout, shape, parts_by(layout, shape, 2), (2,), {(0,): 0, (1,): 1}, even=even)
    assert str(raised.value).endswith(f"pass session.redistribute(matrix, Layout.parse('{suggested}'))")
    assert f"layout {layout} is none" in str(raised.value)


def test_where_nothing_else_is_even_all_have_all():
    parts = parts_by(Layout.rows([4, 3]), (7, 9), 2)
    with pytest.raises(ParamError, match=r"of one shape.*'replicated'"):
        cuts_of("It is", Layout.rows([4, 3]), (7, 9), parts, (2,), {(0,): 0, (1,): 1}, even=True)


# -- what libraries have -------------------------------------------------------------------------


def test_a_dtensor_says_what_a_rank_has():
    local = np.ones((2, 4))
    given = of_dtensor(dtensor([Shard(-2)], [1], local=local))
    assert given.arrays == {((3, 5), (0, 4)): local}
    assert (given.shape, given.places, given.num_places) == ((5, 4), [(1,)], 2)
    outside = of_dtensor(dtensor([Replicate()], None))
    assert outside.arrays == {}
    assert outside.places == []


def test_a_tensor_that_is_under_way_is_awaited():
    local = np.ones((3, 4))
    pending = types.SimpleNamespace(wait=lambda: local)
    (found,) = of_dtensor(dtensor([Shard(0)], [0], local=pending)).arrays.values()
    assert found is local


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (dtensor([Partial()], [0]), "Partial.* over dimension 0 .* not formed yet: pass x.redistribute"),
        (dtensor([Shard(0), _MaskPartial()], [0, 0], (1, 2)), "_MaskPartial.* over dimension 1 .* not formed yet"),
        (dtensor([_StridedShard(0), Shard(0)], [0, 0], (1, 2)), "_StridedShard.* over dimension 0 .*x.redistribute"),
        (dtensor([Shard(0)], [0], shape=(5,)), "1 dimension, a matrix has two: a vector is"),
        (
            dtensor(
                [Shard(0), Shard(0)], [0, 0], (2, 2),
                _spec=types.SimpleNamespace(shard_order=[types.SimpleNamespace(tensor_dim=0, mesh_dims=(1, 0))]),
            ),
            "cut in the order",
        ),
        (np.ones((2, 2)), "ndarray is no DTensor: .*session.distribute"),
    ],
)  # fmt: skip
def test_what_is_no_dealt_matrix_is_refused(given, words):
    with pytest.raises(ParamError, match=words):
        of_dtensor(given)


def test_gradients_are_refused():
    given = dtensor([Shard(0)], [0])
    given.requires_grad = True
    with pytest.raises(ParamError, match=r"x\.detach\(\)"):
        of_dtensor(given)


def test_an_array_of_jax_says_what_a_rank_has_when_it_is_there():
    asked = []
    data, device = np.ones((4, 3)), types.SimpleNamespace(id=7)
    shard = types.SimpleNamespace(index=(slice(4, 8), slice(None)), data=data, device=device)
    given = types.SimpleNamespace(
        shape=(8, 3),
        addressable_shards=[shard],
        sharding=types.SimpleNamespace(device_set={7, 9}, spec="P('x')"),
        block_until_ready=lambda: asked.append(1),
    )
    found = of_jax(given)
    assert found.arrays == {((4, 8), (0, 3)): data}
    assert (found.places, found.num_places, found.dealt) == ([(7,)], 2, "P('x')")
    assert asked
    with pytest.raises(ParamError, match="no array of JAX"):
        of_jax(np.ones((3, 3)))


def test_meshes_say_which_devices_are_a_ranks():
    assert TorchMesh(Mesh((2, 3), [1, 2])).places == [(1, 2)]
    assert TorchMesh(Mesh((2, 3), None)).places == []
    devices = np.array([["a", "b"], ["c", "d"]])
    mesh = JaxMesh(types.SimpleNamespace(devices=devices, axis_names=("x", "y"), local_devices=["c"]))
    assert (mesh.shape, mesh.places) == ((2, 2), [(1, 0)])
    for make in (TorchMesh, JaxMesh):
        with pytest.raises(ParamError, match="mesh is a tuple: pass a"):
            make((2, 2))


def test_neither_library_is_loaded_to_know_its_arrays():
    code = "import uncut_mpi.api.session, sys; assert not {'torch', 'jax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
