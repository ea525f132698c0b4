"""Matrices of which each rank has a part, any part in memory of any kind, for tests on several ranks."""

from __future__ import annotations

import itertools

import numpy as np

from uncut_mpi import Layout
from uncut_mpi.model.dtypes import DType


def random_layout(rng, shape, size):
    """Return a layout of any kind, with parts of any size, the same on all ranks."""
    ranks = rng.sample(range(size), size)
    rows = rng.choice([one for one in range(1, size + 1) if size % one == 0])

    def cut(extent, parts):
        edges = [0, *sorted(rng.randint(0, extent) for _ in range(parts - 1)), extent]
        return [stop - start for start, stop in itertools.pairwise(edges)]

    return rng.choice(
        (
            Layout.whole(ranks[0]),
            Layout.rows(cut(shape[0], size), ranks=ranks),
            Layout.cols(cut(shape[1], size), ranks=ranks),
            Layout.blocks(cut(shape[0], rows), cut(shape[1], size // rows), ranks=ranks),
            Layout.replicated(ranks=ranks[: rng.randint(1, size)]),
        )
    )


def distributed(session, rng, data, orders):
    """
    Return `data` as a matrix: any layout, each rank's part in memory of any kind, of any leading dimension.

    Each rank's array is in one of the orders given; those in shared memory are in the first of them.
    """
    layout = random_layout(rng, data.shape, session.size)
    memory, more = [rng.choice(("device", "host", "shared")) for _ in range(session.size)], rng.randint(0, 2)
    shared = session.empty_host(data.shape, data.dtype, order=orders[0])
    own = rng.choices(orders, k=session.size)[session.rank]
    rows, cols = layout.indices(data.shape, session.rank, num_ranks=session.size)
    part = None
    if len(rows) and len(cols):
        mine, kind = memory[session.rank], DType.parse(data.dtype)
        if mine == "shared" and layout.kind == "replicated":
            mine = "host"  # replicas in one memory are one
        if mine == "shared":
            part = shared.array[rows[0] : rows[-1] + 1, cols[0] : cols[-1] + 1]
        else:
            around = (len(rows) + more, len(cols) + more)
            whole = np.empty(around, kind.numpy, own) if mine == "host" else session._backend.empty(*around, kind, own)
            part = whole[: len(rows), : len(cols)]
        part[...] = data[np.ix_(rows, cols)]
    matrix = session.distribute(part, layout, shape=data.shape)
    session.release(shared)
    return matrix
