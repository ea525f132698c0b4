"""Matrices of which each rank has a part, any part in memory of any kind, for tests on several ranks."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import random
import shutil
import tempfile

import numpy as np

import uncut_mpi as um
from tests.helpers import interpret
from tests.helpers.collective import collective_assert
from tests.helpers.faulty import Disorder, FaultyBackend
from tests.helpers.numbers import op_of
from tests.helpers.products import array_of, shows
from tests.helpers.sessions import memories, uniform_on_nodes
from uncut_mpi import Layout, ScheduleOptions
from uncut_mpi.model.dtypes import MEASURED, DType
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.options import BLOCK_ORDERS, COMBINES, DELIVERIES, Blocking


def random_layout(rng, shape, size):
    """Return a layout of any kind, with parts of any size, the same on all ranks."""
    ranks = rng.sample(range(size), size)
    rows = rng.choice([one for one in range(1, size + 1) if size % one == 0])

    def cut(extent, parts):
        edges = [0, *sorted(rng.randint(0, extent) for _ in range(parts - 1)), extent]
        return [stop - start for start, stop in itertools.pairwise(edges)]

    grid = rows, size // rows
    return rng.choice(
        (
            Layout.block_cyclic(
                rng.randint(1, 9),
                rng.randint(1, 9),
                grid,
                source=(rng.randrange(grid[0]), rng.randrange(grid[1])),
                grid_order=rng.choice("RC"),
                ranks=rng.choice((None, ranks)),
            ),
            Layout.block_cyclic(4, 3, grid, ranks=ranks),
            Layout.whole(ranks[0]),
            Layout.rows(cut(shape[0], size), ranks=ranks),
            Layout.cols(cut(shape[1], size), ranks=ranks),
            Layout.blocks(cut(shape[0], rows), cut(shape[1], size // rows), ranks=ranks),
            Layout.replicated(ranks=ranks[: rng.randint(1, size)]),
        )
    )


def fill(array, data):
    """Write data of the host to an array of the host or of a device."""
    if not isinstance(array, np.ndarray):
        import cupy

        data = cupy.asarray(data)
    array[...] = data


def on_host(array):
    """Return what an array of the host or of a device has."""
    return array if isinstance(array, np.ndarray) else array.get()


def part_of(matrix, data):
    """Return what this rank has of `data` where `matrix` has it."""
    return data[np.ix_(*matrix.local_indices)]


def made_of(session, data, layout, **more):
    """Return `data` as a new matrix of a layout. Collective."""
    matrix = session.empty(data.shape, data.dtype, layout, **more)
    fill(matrix.local, part_of(matrix, data))
    session.barrier()
    return matrix


def check_part(comm, matrix, wanted, told="", tolerance=1e-13):
    """Fail on all ranks if what a rank has of a matrix is not what it has of `wanted`. Collective."""
    found, right = on_host(matrix.local), part_of(matrix, wanted)
    good = found.shape == right.shape and np.allclose(found, right, tolerance, tolerance)
    collective_assert(comm, good, f"{told or repr(matrix)}: {found} of {right}")


def address_of(array):
    """Return where the first element of an array of the host or of a device is."""
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


def distributed(session, rng, data, orders):
    """
    Return `data` as a matrix: any layout, each rank's part in memory of any kind, of any leading dimension.

    Each rank's array is in one of the orders given; those in shared memory are in the first of them.
    """
    layout = random_layout(rng, data.shape, session.size)
    memory, more = [rng.choice(memories(session.size)) for _ in range(session.size)], rng.randint(0, 2)
    shared = session.empty_host(data.shape, data.dtype, order=orders[0])
    own = rng.choices(orders, k=session.size)[session.rank]
    rows, cols = layout.indices(data.shape, session.rank, num_ranks=session.size)
    part = None
    if len(rows) and len(cols):
        mine, kind = memory[session.rank], DType.parse(data.dtype)
        if mine == "shared" and (layout.kind == "replicated" or layout.cyclic):
            mine = "host"  # replicas in one memory are one, and blocks lie one behind the other in no part of it
        if mine == "shared":
            part = shared.array[rows[0] : rows[-1] + 1, cols[0] : cols[-1] + 1]
        else:
            around = (len(rows) + more, len(cols) + more)
            whole = np.empty(around, kind.numpy, own) if mine == "host" else session._backend.empty(*around, kind, own)
            part = whole[: len(rows), : len(cols)]
        fill(part, data[np.ix_(rows, cols)])
    matrix = session.distribute(part, layout, shape=data.shape)
    session.release(shared)
    return matrix


def check_copies(comm, session, matrix, data):
    """Fail on all ranks if what is gathered or downloaded of a matrix is not `data`."""
    array = session.gather(matrix)
    collective_assert(comm, comm.rank > 0 or np.array_equal(array, data), f"{matrix!r} of {data}: gathered {array}")
    copy = session.download(matrix)
    collective_assert(comm, shows(copy, data), f"{matrix!r} of {data}: downloaded {array_of(copy)}")
    session.barrier()
    session.release(copy)


def cut_up(session, rng, data, orders):
    """Return `data` as a matrix in any rectangles, of one rank or two each, and what this rank has of it."""
    whole = [((0, data.shape[0]), (0, data.shape[1]))]
    for _ in range(rng.randint(0, 6)):
        rows, cols = whole.pop(rng.randrange(len(whole)))
        cut = rng.randint(*(rows if rng.random() < 0.5 else cols))
        ends = [(rows, cols)]
        if rows[0] < cut < rows[1]:
            ends = [((rows[0], cut), cols), ((cut, rows[1]), cols)]
        elif cols[0] < cut < cols[1]:
            ends = [(rows, (cols[0], cut)), (rows, (cut, cols[1]))]
        whole += ends
    mine = []
    for (top, bottom), (left, right) in whole:
        for rank in rng.sample(range(session.size), rng.choice((1, 1, 1, min(2, session.size)))):
            on_device, more, order = rng.random() < 0.6, rng.randint(0, 2), rng.choice(orders)
            if rank != session.rank:
                continue
            around, kind = (bottom - top + more, right - left + more), DType.parse(data.dtype)
            array = session._backend.empty(*around, kind, order) if on_device else np.empty(around, kind.numpy, order)
            part = array[: bottom - top, : right - left]
            fill(part, data[top:bottom, left:right])
            mine.append((part, (top, left)))
    return session.distribute_parts(mine, shape=data.shape, dtype=data.dtype), mine


def in_file(session, data, order):
    """Return `data` as a matrix in a file, which has no name any more."""
    folder = session.gather_values(tempfile.mkdtemp() if session.rank == 0 else None)[0]
    path = os.path.join(folder, "x.npy")
    if session.rank == 0:
        np.save(path, np.array(data, order=order))
    session.barrier()
    matrix = session.open_file(path, dtype=DType.parse(data.dtype), mode="r+")
    session.barrier()
    if session.rank == 0:
        shutil.rmtree(folder)
    return matrix


def random_blocking(rng, size):
    """Return options of kblocks for so many ranks."""
    order, combine = rng.choice(BLOCK_ORDERS), rng.choice(COMBINES)
    devices = rng.choice((None, tuple(rng.sample(range(size), rng.randint(1, size)))))
    if rng.random() < 0.4:
        edges = {name: rng.choice((0, rng.randint(3, 30))) for name in ("c_rows", "c_cols")}
        slots, columns = rng.randint(1, 4), rng.randint(1, 4)
        in_rings = Blocking(block=rng.randint(3, 16), slots=slots, c_slots=rng.choice((1, 2)), columns=columns, **edges)
        return ScheduleOptions("kblocks", devices=devices, blocking=in_rings)
    return ScheduleOptions(
        scheduler="kblocks",
        devices=devices,
        blocking=Blocking(
            first=rng.choice((1, 4, 16)),
            block=16,
            columns=rng.randint(1, 4),
            order=order,
            lanes=rng.choice((1, 2)),
            delivery=rng.choice(DELIVERIES),
            combine=combine,
            away=0 if combine == "worker" else rng.choice((0, 1, 3)),
        ),
    )


def random_matrix(session, rng, data, orders):
    """Return `data` as a matrix that is dealt, cut up or in a file."""
    how = rng.random()
    if how < 0.2:
        return in_file(session, data, orders[0])
    return cut_up(session, rng, data, orders)[0] if how < 0.6 else distributed(session, rng, data, orders)


def random_product(session, seed):
    """Multiply matrices in any parts with any options, and return what is wrong with C here. Collective."""
    rng = random.Random(seed)
    dtype = rng.choice([one for one in MEASURED if one is not DType.tf32])
    m, n, k = rng.randint(1, 40), rng.randint(1, 40), rng.randint(1, 60)
    orders, trans = rng.choices(("C", "F", "CF"), k=3), rng.choices("NTC", k=2)
    every = (1.2345, 1.0, 0.0, -0.75, *([0.5 - 1.5j] * 2 if dtype.is_complex else ()))
    alpha, beta = (rng.choice(every) for _ in range(2))
    problem = GemmProblem(m, n, k, dtype, reads_c=beta != 0, scales_only=alpha == 0)
    data = interpret.random_data(problem, seed, alpha=alpha, beta=beta)
    inputs = [op_of(how, one) for one, how in zip((data.a, data.b), trans, strict=True)]
    a, b = (random_matrix(session, rng, one, order) for one, order in zip(inputs, orders[:2], strict=True))
    if result_in_file := rng.random() < 0.2:
        c, mine = in_file(session, data.c, orders[2][0]), []
    else:
        c, mine = cut_up(session, rng, data.c, orders[2])
    options = random_blocking(rng, session.size) if rng.random() < 0.9 else ScheduleOptions()
    options = dataclasses.replace(options, host_memory=rng.choice((0, 2000, 5000, 20000, 100_000)))
    options = dataclasses.replace(options, device_memory=rng.choice((0, 0, 1000, 3000, 8000, 20000)))
    scalars = {"alpha": alpha, "beta": beta, "trans_a": trans[0], "trans_b": trans[1]}
    try:
        session.gemm(a, b, c, **scalars, options=options)
    except um.CapacityError:  # the same on all ranks
        options = dataclasses.replace(options, host_memory=1 << 20)
        try:
            session.gemm(a, b, c, **scalars, options=options)
        except um.CapacityError:
            options = dataclasses.replace(options, device_memory=0)
            session.gemm(a, b, c, **scalars, options=options)
    if result_in_file:
        array = array_of(session.download(c))
        mine = [] if array is None else [(array, (0, 0))]
    result, bound = interpret.reference(problem, data)
    wrong = ""
    for part, (top, left) in mine:
        place = slice(top, top + part.shape[0]), slice(left, left + part.shape[1])
        if not (np.abs(part.astype(result.dtype) - result[place]) <= bound[place]).all():
            wrong = f"C at {place} of {a!r} x {b!r} = {c!r}, {trans}, alpha {alpha}, beta {beta}, {options}"
    session.barrier()
    for matrix in (a, b, c):
        session.release(matrix)
    return wrong


def shaken(comm, seed):
    """Return a session whose ranks run what is ready in random order, after random pauses, and deliver flags late."""
    backend = functools.partial(FaultyBackend, disorder=Disorder(seed, pause_s=1e-3))
    return um.Session(comm, backend=backend, machine=uniform_on_nodes(comm.size), verify=True)


def uneven(extent, count):
    """Return so many extents that are not equal and sum to this."""
    edges = [extent * part // count + 8 * (part % 2) for part in range(count)]
    return [stop - start for start, stop in itertools.pairwise([*edges, extent])]
