"""DTensors of PyTorch and arrays of JAX are matrices where they lie, and matrices are shown to both as theirs."""

from __future__ import annotations

import gc
import re

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers.collective import collective_assert, expect
from tests.helpers.dealers import as_numpy, jax_processes, ordinal_of, torch_group
from tests.helpers.distributed import fill
from tests.helpers.products import random_matrix
from tests.helpers.sessions import SHARED
from uncut_mpi import Layout
from uncut_mpi.model.dtypes import DType

# Both libraries warn of what does not matter here.
pytestmark = pytest.mark.filterwarnings("ignore")

M, N, K = 37, 29, 53
"""Of which no number of ranks but 1 is a divisor."""


@pytest.fixture(scope="module")
def torch(comm, session):
    """The library, of whose processes each is a rank."""
    with torch_group(comm, ordinal_of(session)) as torch:
        yield torch


@pytest.fixture(scope="module")
def jax(comm, session):
    """The library, of whose processes each is a rank."""
    with jax_processes(comm, ordinal_of(session)) as jax:
        yield jax


@pytest.fixture
def kind(session):
    """The devices of a mesh of torch."""
    return "cpu" if session.backend_name == "host" else "cuda"


def device_of(torch, session):
    ordinal = ordinal_of(session)
    return torch.device("cpu") if ordinal is None else torch.device("cuda", ordinal)


def grid_of(size):
    return (2, size // 2) if size % 2 == 0 else (1, size)


def placed(torch, word):
    """Return the placements that a word names: S0, S1 or R for each dimension of a mesh."""
    of = torch.distributed.tensor
    return [of.Replicate() if one == "R" else of.Shard(int(one[1])) for one in word.split()]


def mesh_of(torch, kind, size, word):
    shape = (size,) if " " not in word else grid_of(size)
    return torch.distributed.device_mesh.init_device_mesh(kind, shape)


def as_tensor(torch, session, data):
    """Return the same numbers as a tensor; float64 has those of every type."""
    kind = {np.dtype(np.float64): "float64", np.dtype(np.float32): "float32"}.get(data.dtype, "bfloat16")
    return torch.from_numpy(data.astype(np.float64)).to(device_of(torch, session), getattr(torch, kind))


def dealt_by_torch(torch, session, mesh, word, data):
    """Return a DTensor of the numbers that every rank has, by torch's own rule."""
    # Without a source nothing is sent: each rank takes its part of its own numbers.
    return torch.distributed.tensor.distribute_tensor(
        as_tensor(torch, session, data), mesh, placed(torch, word), src_data_rank=None
    )


def gathered(session, comm, matrix):
    whole = session.gather(matrix, 0)
    return comm.bcast(None if whole is None else as_numpy(whole))


def is_product(found, a, b, dtype):
    """Whether every element is within Higham's bound (2002, section 3.5) of k products, and one rounding."""
    exact, bound = as_numpy(a) @ as_numpy(b), np.abs(as_numpy(a)) @ np.abs(as_numpy(b))
    dtype = DType.parse(dtype)
    gamma = (a.shape[1] + 2) * dtype.accumulator.unit_roundoff
    return bool((np.abs(found - exact) <= gamma * bound + dtype.unit_roundoff * np.abs(exact)).all())


# -- DTensor -------------------------------------------------------------------------------------

WORDS = ["S0", "S1", "R", "S0 S1", "S1 S0", "S0 S0", "S1 S1", "S0 R", "R S1", "R R"]


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("rows", [M, 3])
def test_a_dtensor_is_a_matrix_where_it_lies_and_comes_back(comm, session, torch, kind, word, rows):
    data = random_matrix(rows, N, DType.f64, (1,))
    mesh = mesh_of(torch, kind, comm.size, word)
    given = dealt_by_torch(torch, session, mesh, word, data)
    local = given.to_local()
    matrix = session.from_dtensor(given)
    back = matrix.to_dtensor(mesh)
    pointers = [matrix.address, back.to_local().data_ptr(), local.data_ptr()] if local.numel() else [0]
    collective_assert(comm, len(set(pointers)) == 1, f"{word}: {pointers}")
    collective_assert(comm, np.array_equal(gathered(session, comm, matrix), data), f"{matrix.layout}")
    shapes = tuple(back.shape), tuple(back.to_local().shape)
    collective_assert(comm, shapes == (data.shape, tuple(local.shape)), f"{back.placements}: {shapes}")
    again = torch.distributed.tensor.distribute_tensor(
        as_tensor(torch, session, data), mesh, back.placements, src_data_rank=None
    )
    collective_assert(comm, torch.equal(again.to_local(), back.to_local()), f"{back.placements}")


def chunks(extent, count):
    """What `torch.chunk` makes of an extent, empty parts at its end too."""
    each = -(-extent // count)
    return tuple(max(0, min(each, extent - at * each)) for at in range(count))


@pytest.mark.parametrize("dtype", ["f64", "f32", "bf16"])
@pytest.mark.parametrize("words", [("S0", "R", "S0"), ("R", "S1", "S1"), ("S1", "S0", "S0"), ("S0 S1", "R S1", "S0 R")])
def test_products_of_dtensors_are_written_into_dtensors(comm, session, torch, kind, words, dtype):
    numbers = DType.parse(dtype)
    shapes = (M, K), (K, N), (M, N)
    data = [random_matrix(*shape, numbers, (2, at)) for at, shape in enumerate(shapes)]
    data[2][:] = np.nan
    given = [
        dealt_by_torch(torch, session, mesh_of(torch, kind, comm.size, word), word, one)
        for word, one in zip(words, data, strict=True)
    ]
    if dtype == "bf16":
        given = [one.to(torch.bfloat16) for one in given]
    a, b, c = map(session.from_dtensor, given)
    session.gemm(a, b, c)
    found = gathered(session, comm, c)
    collective_assert(comm, is_product(found, data[0], data[1], dtype), f"{words}: {found[:2, :2]}")
    part = as_numpy(given[2].to_local())
    there = dealt_by_torch(torch, session, given[2].device_mesh, words[2], found).to_local()
    collective_assert(comm, np.array_equal(part, as_numpy(there)), f"{words}: {part[:2, :2]}")


@pytest.mark.parametrize("dtype", ["f64", "bf16"])
@pytest.mark.parametrize("memory", ["device", "host", SHARED])
@pytest.mark.parametrize("order", ["C", "F"])
def test_results_of_the_session_are_dtensors_without_a_copy(comm, session, torch, kind, memory, order, dtype):
    a = session.scatter(random_matrix(M, K, DType.parse(dtype), (3,)) if comm.rank == 0 else None, Layout.rows())
    b = session.scatter(random_matrix(K, N, DType.parse(dtype), (4,)) if comm.rank == 0 else None, Layout.cols())
    where = kind if memory == "device" else "cpu"
    mesh = torch.distributed.device_mesh.init_device_mesh(where, (comm.size,))
    c = session.empty((M, N), dtype, Layout.rows(chunks(M, comm.size)), memory=memory, order=order)
    shown = c.to_dtensor(mesh)
    session.gemm(a, b, c)  # into the DTensor's memory
    right = gathered(session, comm, c)
    local = shown.to_local()
    words = getattr(c.local, "__cuda_array_interface__", None) or c.local.__array_interface__
    collective_assert(comm, not local.numel() or local.data_ptr() == words["data"][0], f"{local.data_ptr():#x}")
    rows, _ = c.local_indices
    collective_assert(comm, np.array_equal(as_numpy(local), right[rows]), f"{as_numpy(local)[:2, :2]}")
    whole = as_numpy(shown.full_tensor()) if not session.devices_shared or where == "cpu" else right
    collective_assert(comm, np.array_equal(whole, right), f"{whole[:2, :2]}")


def test_views_are_dtensors_too(comm, session, torch, kind):
    each = 4
    c = session.empty((each * comm.size, N), "f32", Layout.rows())
    mesh = mesh_of(torch, kind, comm.size, "S0")
    for view, word in ((c[:, 3:17], "S0"), (c.T, "S1"), (c[:, 3:17].T, "S1")):
        shown = view.to_dtensor(mesh)
        fine = tuple(shown.shape) == view.shape and shown.to_local().data_ptr() == view.address
        fine &= list(shown.placements) == placed(torch, word) or comm.size == 1
        collective_assert(comm, fine, f"{shown.placements}, {tuple(shown.shape)}")


def test_the_mesh_says_whose_parts_are_whose(comm, session, torch, kind):
    backwards = list(range(comm.size))[::-1]
    mesh = torch.distributed.device_mesh.DeviceMesh(kind, backwards)
    data = random_matrix(M, N, DType.f64, (5,))
    matrix = session.from_dtensor(dealt_by_torch(torch, session, mesh, "S0", data))
    counts = chunks(M, comm.size)
    wanted = Layout.rows(counts, ranks=backwards) if comm.size > 1 else Layout.rows(counts)
    collective_assert(comm, matrix.layout == wanted, str(matrix.layout))
    collective_assert(comm, np.array_equal(gathered(session, comm, matrix), data), "other numbers")
    back = matrix.to_dtensor(mesh)
    collective_assert(comm, list(back.placements) == placed(torch, "S0"), str(back.placements))
    if comm.size > 1:
        straight = mesh_of(torch, kind, comm.size, "S0")
        expect(comm, um.ParamError, ["redistribute", f"'rows({','.join(map(str, counts))})'"],
               lambda: matrix.to_dtensor(straight))  # fmt: skip


def test_ranks_of_torch_and_of_the_session_may_differ(comm, torch, kind, open_session):
    other = comm.Split(0, -comm.rank)
    data = random_matrix(M, N, DType.f64, (6,))
    with open_session(other) as session:
        mesh = mesh_of(torch, kind, comm.size, "S0")
        matrix = session.from_dtensor(dealt_by_torch(torch, session, mesh, "S0", data))
        collective_assert(comm, np.array_equal(gathered(session, other, matrix), data), str(matrix.layout))
    other.Free()


def test_a_mesh_of_other_ranks_is_refused_by_all(comm, session, torch, kind, open_session):
    if comm.size == 1:
        pytest.skip("one rank")
    alone = [torch.distributed.device_mesh.DeviceMesh(kind, [rank]) for rank in range(comm.size)][comm.rank]
    mine = dealt_by_torch(torch, session, alone, "S0", np.ones((4, 4)))
    expect(comm, um.ParamError, ["mesh of 1 device", "init_process_group"], lambda: session.from_dtensor(mine))
    every = mesh_of(torch, kind, comm.size, "S0")
    half = comm.Split(comm.rank % 2, comm.rank)
    with open_session(half) as small:
        given = dealt_by_torch(torch, small, every, "S0", np.ones((4, 4)))
        expect(half, um.ParamError, [f"mesh of {comm.size} devices"], lambda: small.from_dtensor(given))
        matrix = small.empty((4, 4), "f64", Layout.rows())
        expect(half, um.ParamError, [f"mesh of {comm.size} devices"], lambda: matrix.to_dtensor(every))
    half.Free()


def test_ranks_outside_of_the_mesh_have_nothing(comm, session, torch, kind):
    if comm.size == 1:
        pytest.skip("one rank")
    mesh = torch.distributed.device_mesh.DeviceMesh(kind, [1])
    data = random_matrix(M, N, DType.f64, (7,))
    given = dealt_by_torch(torch, session, mesh, "S0", data)
    matrix = session.from_dtensor(given)
    collective_assert(comm, matrix.layout == Layout.rows([M], ranks=[1]), str(matrix.layout))
    collective_assert(comm, np.array_equal(gathered(session, comm, matrix), data), "other numbers")
    back = matrix.to_dtensor(mesh)
    same = comm.rank != 1 or back.to_local().data_ptr() == given.to_local().data_ptr()
    collective_assert(comm, same and tuple(back.shape) == (M, N), f"{tuple(back.shape)}")


def test_what_is_no_matrix_yet_is_refused_with_the_mend(comm, session, torch, kind):
    of = torch.distributed.tensor
    mesh = mesh_of(torch, kind, comm.size, "S0")
    device = device_of(torch, session)
    ones = torch.ones(4, 4, device=device)
    for given, words in (
        (
            of.DTensor.from_local(ones, mesh, [of.Partial()], run_check=False),
            ["Partial", "not formed yet", "x.redistribute("],
        ),
        (of.DTensor.from_local(ones.clone().requires_grad_(), mesh, [of.Shard(0)], run_check=False), ["x.detach()"]),
        (of.DTensor.from_local(torch.ones(4, device=device), mesh, [of.Shard(0)], run_check=False), ["1 dimension, "]),
        (ones, ["no DTensor", "session.distribute"]),
    ):
        expect(comm, um.ParamError, words, lambda given=given: session.from_dtensor(given))
    if comm.size > 1:  # as torch takes them without shape= and stride=
        uneven = of.DTensor.from_local(
            torch.ones(4 + comm.rank, 4, device=device), mesh, [of.Shard(0)], run_check=False
        )
        expect(comm, um.RankMismatchError, ["values: shape: "], lambda: session.from_dtensor(uneven))


def test_a_layout_that_torch_has_not_is_refused_with_one_that_it_has(comm, session, torch, kind):
    if comm.size == 1:
        pytest.skip("one rank has everything")
    data = random_matrix(M, N, DType.f64, (8,))
    mesh = mesh_of(torch, kind, comm.size, "S0")
    counts = [1] * (comm.size - 1)
    for layout, suggested in (
        (Layout.rows([M - sum(counts), *counts]), "rows"),
        (Layout.cols([*counts, N - sum(counts)]), "cols"),
        (Layout.whole(1), "rows"),
        (Layout.block_cyclic(2, 3, (1, comm.size)), "rows"),
    ):
        matrix = session.scatter(data if comm.rank == 0 else None, layout)
        said = []
        expect(comm, um.ParamError, ["redistribute", f"Layout.parse('{suggested}"],
               lambda matrix=matrix, said=said: told(said, matrix, mesh))  # fmt: skip
        other = session.redistribute(matrix, Layout.parse(re.search(r"Layout.parse\('(.*)'\)", said[0])[1]))
        shown = other.to_dtensor(mesh)
        collective_assert(comm, shown.to_local().data_ptr() == other.address, f"{layout}")


def told(said, matrix, mesh):
    try:
        matrix.to_dtensor(mesh)
    except um.ParamError as error:
        said.append(str(error))
        raise


def test_odd_meshes_and_matrices_are_refused_by_all(comm, session, torch, kind):
    matrix = session.empty((4 * comm.size, 4), "f64", Layout.rows())
    expect(comm, um.ParamError, ["mesh is a str", "init_device_mesh"], lambda: matrix.to_dtensor("mesh"))
    expect(comm, um.ParamError, ["mesh is a str", "make_mesh"], lambda: matrix.to_jax("mesh"))
    if kind == "cuda":
        mesh = mesh_of(torch, "cpu", comm.size, "S0")
        expect(comm, um.ParamError, ["the mesh is of cpu"], lambda: matrix.to_dtensor(mesh))
    mesh = mesh_of(torch, kind, comm.size, "S0")
    session.release(matrix)
    with pytest.raises(um.ParamError, match="released"):
        matrix.to_dtensor(mesh)


@pytest.mark.parametrize("memory", ["device", "host", SHARED])
@pytest.mark.parametrize("released", [False, True])
def test_a_dtensor_keeps_the_memory_of_its_matrix(comm, session, torch, kind, memory, released):
    mesh = mesh_of(torch, kind if memory == "device" else "cpu", comm.size, "S0")
    matrix = session.empty((8 * comm.size, 64), "f64", Layout.rows(), memory=memory)
    shown = matrix.to_dtensor(mesh)
    shown.to_local().fill_(3.0)
    if released:
        session.release(matrix)
    del matrix
    gc.collect()
    others = [session.empty((8 * comm.size, 64), "f64", Layout.rows(), memory=memory) for _ in range(3)]
    for one in others:
        one.local[...] = 1.0
    collective_assert(comm, bool((shown.to_local() == 3.0).all()), f"{as_numpy(shown.to_local())[:2, :2]}")


def test_arrays_of_jax_are_no_tensors_since_these_can_be_written(comm, session, torch, jax, kind):
    mesh = jax_mesh(jax, comm.size, ("x",))
    matrix = session.from_jax(dealt_by_jax(jax, mesh, ("x", None), np.ones((4 * comm.size, 4))))
    over = mesh_of(torch, kind, comm.size, "S0")
    expect(comm, um.ParamError, ["read-only"], lambda: matrix.to_dtensor(over))


# -- JAX -----------------------------------------------------------------------------------------

SPECS = [("x", None), (None, "x"), (None, None), ("x", "y"), ("y", "x"), (("x", "y"), None), (("y", "x"), None), ("x",)]


def dealt_by_jax(jax, mesh, spec, data):
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    return jax.make_array_from_callback(data.shape, sharding, lambda index: data[index])


def jax_mesh(jax, size, spec):
    names = ("x", "y") if "y" in str(spec) else ("x",)
    shape = grid_of(size) if len(names) == 2 else (size,)
    return jax.sharding.Mesh(np.array(jax.devices()).reshape(shape), names)


def shard_of(array):
    (shard,) = array.addressable_shards
    return shard.data


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("dtype", ["f64", "bf16"])
def test_an_array_of_jax_is_a_matrix_where_it_lies_and_comes_back(comm, session, jax, spec, dtype):
    data = random_matrix(8 * comm.size, 16 * comm.size, DType.parse(dtype), (11,))
    mesh = jax_mesh(jax, comm.size, spec)
    given = dealt_by_jax(jax, mesh, spec, data)
    matrix = session.from_jax(given)
    if comm.size == 4 and spec == (("y", "x"), None):  # JAX's own order, which other layouts have not
        expect(comm, um.ParamError, ["'rows(8,8,8,8)'"], lambda: matrix.to_jax(mesh))
        session.release(matrix)
        return
    back = matrix.to_jax(mesh)
    pointers = [matrix.address, shard_of(back).unsafe_buffer_pointer(), shard_of(given).unsafe_buffer_pointer()]
    collective_assert(comm, len(set(pointers)) == 1, f"{pointers}")
    collective_assert(comm, np.array_equal(gathered(session, comm, matrix), as_numpy(data)), f"{matrix.layout}")
    same = back.sharding.devices_indices_map(back.shape) == given.sharding.devices_indices_map(given.shape)
    collective_assert(comm, same, f"{back.sharding}")
    collective_assert(comm, back.dtype == given.dtype and back.shape == given.shape, f"{back.dtype} {back.shape}")


def test_products_of_arrays_of_jax_are_arrays_of_jax(comm, session, jax):
    m, n, k = 8 * comm.size, 6 * comm.size, 5 * comm.size
    mesh = jax_mesh(jax, comm.size, ("x",))
    for dtype, first, second in (("f64", ("x", None), (None, "x")), ("bf16", (None, "x"), ("x", None))):
        data = [random_matrix(*shape, DType.parse(dtype), (12, at)) for at, shape in enumerate(((m, k), (k, n)))]
        a, b = (
            session.from_jax(dealt_by_jax(jax, mesh, spec, one))
            for spec, one in zip((first, second), data, strict=True)
        )
        c = session.gemm(a, b, out_layout=Layout.rows())
        shown = c.to_jax(mesh)
        collective_assert(comm, shard_of(shown).unsafe_buffer_pointer() == c.address, f"{c.address:#x}")
        rows, _ = c.local_indices
        found = gathered(session, comm, c)
        collective_assert(comm, is_product(found, *data, dtype), f"{found[:2, :2]}")
        here = as_numpy(shard_of(shown))
        collective_assert(comm, np.array_equal(here, found[rows]), f"{here[:2, :2]}")
        collective_assert(comm, shown.sharding.spec == jax.sharding.PartitionSpec("x", None), f"{shown.sharding}")
        twice = as_numpy(shard_of(jax.jit(lambda x: x + x)(shown)))
        collective_assert(comm, np.array_equal(twice, 2 * here), f"{twice[:2, :2]}")
        expect(comm, um.ParamError, ["read-only"], lambda a=a, b=b, c=c: session.gemm(c, b, a, trans_b="T"))


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("memory", ["device", "host"])
def test_matrices_of_the_session_are_arrays_of_jax_without_a_copy(comm, session, jax, order, memory):
    if memory == "host" and session.backend_name == "cuda":
        pytest.skip("its devices are GPUs")
    matrix = session.empty((3 * comm.size, 50), "f32", Layout.rows(), order=order, memory=memory)
    mine = random_matrix(3, 50, DType.f32, (13, comm.rank))
    fill(matrix.local, mine)
    shown = matrix.to_jax(jax_mesh(jax, comm.size, ("x",)))
    collective_assert(comm, shard_of(shown).unsafe_buffer_pointer() == matrix.address, f"{matrix.address:#x}")
    collective_assert(comm, np.array_equal(as_numpy(shard_of(shown)), as_numpy(mine)), "other numbers")


def test_what_jax_has_not_is_refused_with_what_it_has(comm, session, jax):
    mesh = jax_mesh(jax, comm.size, ("x",))
    if comm.size > 1:
        odd = session.empty((4 * comm.size + 1, 6 * comm.size), "f32", Layout.rows())
        word = ",".join(["6"] * comm.size)
        expect(comm, um.ParamError, ["parts of one shape", f"'cols({word})'"], lambda: odd.to_jax(mesh))
        session.release(odd)
        whole = session.empty_host((4 * comm.size, 3), "f32")
        expect(comm, um.ParamError, ["whole(0)", "'rows(4,4"], lambda: whole.to_jax(mesh))
        session.release(whole)
    apart = session.empty((4 * comm.size, 64), "f32", Layout.rows())
    expect(comm, um.ParamError, ["without gaps"], lambda: apart[:, :31].to_jax(mesh))
    session.release(apart)
    wide = session.empty((4 * comm.size, 64), "f64", Layout.rows())
    jax.config.update("jax_enable_x64", False)
    expect(comm, um.ParamError, ["jax_enable_x64"], lambda: wide.to_jax(mesh))
    jax.config.update("jax_enable_x64", True)
    session.release(wide)
    expect(comm, um.ParamError, ["no array of JAX"], lambda: session.from_jax(np.eye(3)))
    expect(comm, um.ParamError, ["3 dimensions"], lambda: session.from_jax(jax.numpy.ones((2, 2, 2))))
    if comm.size > 1:  # each has an array of its own device
        local = jax.device_put(np.eye(4), jax.local_devices()[0])
        expect(comm, um.ParamError, ["mesh of 1 device"], lambda: session.from_jax(local))
