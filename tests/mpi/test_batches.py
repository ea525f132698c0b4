"""Batches: arrays of three dimensions and lists of matrices, multiplied as one product."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers.collective import collective_assert, expect
from tests.helpers.distributed import distributed, fill, on_host
from tests.helpers.numbers import factors_of, op_of, random_values
from tests.helpers.products import Case, as_device_array, expected
from uncut_mpi import Layout
from uncut_mpi.model.dtypes import DType

pytestmark = pytest.mark.mpi


def made(session, rng, data, order, memory):
    """Return `data`, of three dimensions, as a batch in memory of some kind, dealt at random; of a larger array or not."""
    count, size = len(data), session.size
    edges = [0, *sorted(rng.randint(0, count) for _ in range(size - 1)), count]
    counts, root, gap = [stop - start for start, stop in itertools.pairwise(edges)], rng.randrange(size), rng.choice((0, 2))
    layout = rng.choice((Layout.rows(counts, ranks=rng.sample(range(size), size)), Layout.whole(root), Layout.replicated()))
    if memory == "shared":
        layout = Layout.rows(counts)
    if memory != "host":
        batch = session.empty(data.shape, data.dtype, layout, order=order, memory=memory)
    else:
        own = layout.indices((count, 1), session.rank, num_ranks=size)[0]
        around = (len(own), data.shape[1] + gap * (order == "C"), data.shape[2] + gap * (order == "F"))
        array = np.full(around, np.nan, data.dtype)
        if order == "F":
            array = np.full((around[0], *around[:0:-1]), np.nan, data.dtype).swapaxes(1, 2)
        part = array[:, : data.shape[1], : data.shape[2]]
        if layout.kind == "whole":
            batch = session.register(part if session.rank == root else None, root=root)
        else:
            batch = session.distribute(part if len(own) else None, layout, shape=rng.choice((None, data.shape)))
    own = batch.layout.indices((count, 1), session.rank, num_ranks=size)[0]
    fill(batch.local, data[own])
    return batch


def matrix(session, rng, data, order):
    """Return `data` as a matrix, dealt at random."""
    return distributed(session, rng, data, order) if data.size else session.empty_host(data.shape, data.dtype, order=order)


def wrong(session, batch, wanted, bound):
    """Return where what this rank has of a batch, or of a list of matrices, is off by more than a bound; empty if nowhere."""
    if isinstance(batch, um.Batch):
        own = batch.layout.indices((len(batch), 1), session.rank, num_ranks=session.size)[0]
        pairs = [(number, found, ...) for number, found in zip(own, on_host(batch.local), strict=True)]
    else:
        pairs = [(number, on_host(one.local), np.ix_(*one.local_indices)) for number, one in enumerate(batch)]
    off = [number for number, found, at in pairs if not (np.abs(found - wanted[number][at]) <= bound[number][at]).all()]
    return f"products {off} are wrong" if off else ""


@pytest.mark.parametrize("seed", range(16))
def test_batches_and_lists_are_multiplied_product_by_product(comm, session, seed):
    rng, values = random.Random(seed), np.random.default_rng(seed)
    dtype = rng.choice((DType.f64, DType.f64, DType.f32, DType.bf16, DType.c64))
    count, listed, single = rng.choice((1, 2, 7, 23)), seed % 2, rng.choice((None, None, 0, 1))
    trans, orders = rng.choices("NTC", k=2), rng.choices("CF", k=3)
    alpha, beta = factors_of(dtype) if rng.random() < 0.5 else (1.0, 0.0)
    shapes = [[rng.randint(0 if listed else 1, 12) for _ in range(3)] for _ in range(count)]
    for at in range(count):  # of equal shapes, or of those that one matrix for all allows
        keep = (1, 1, 1) if not listed else ((1, 0, 1) if single == 0 else (0, 1, 1) if single == 1 else (0, 0, 0))
        shapes[at] = [first if kept else own for first, kept, own in zip(shapes[0], keep, shapes[at], strict=True)]
    a = [random_values(values, (m, k) if trans[0] == "N" else (k, m), dtype) for m, n, k in shapes]
    b = [random_values(values, (k, n) if trans[1] == "N" else (n, k), dtype) for m, n, k in shapes]
    c = [random_values(values, (m, n), dtype) for m, n, k in shapes]
    given = [a, b, c if beta else [np.full_like(one, np.nan) for one in c]]
    operands = []
    for at, (data, order) in enumerate(zip(given, orders, strict=True)):
        if at == single:
            data[:] = [data[0]] * count
            operands.append(matrix(session, rng, data[0], order))
        elif listed:
            operands.append([matrix(session, rng, one, order) for one in data])
        else:
            turned = at == 2 and rng.random() < 0.5
            stack = np.stack([one.T for one in data] if turned else data)
            batch = made(session, rng, stack, order, rng.choice(("host", "device", "shared")))
            operands.append(batch.T if turned else batch)
    both = [
        expected(
            Case(m, n, k, dtype=dtype.name, trans_a=trans[0], trans_b=trans[1], alpha=alpha, beta=beta),
            SimpleNamespace(a_MK=x, b_KN=y, c_MN=z),
        )
        for (m, n, k), x, y, z in zip(shapes, *given, strict=True)
    ]
    how = {"alpha": alpha, "beta": beta, "trans_a": trans[0], "trans_b": trans[1]}
    told = f"seed {seed}: {count} of {shapes[0]} {dtype.name} {orders} {how}, {operands}"
    session.gemm_batch(*operands, **how) if listed else session.gemm(*operands, **how)
    off = wrong(session, operands[2], *zip(*both, strict=True))
    collective_assert(comm, not off, f"{told}: {off}")
    if beta:
        return
    before = session.counters.planner_calls, session.counters.allocations
    session.gemm_batch(*operands, **how)
    again = session.counters.planner_calls, session.counters.allocations
    collective_assert(comm, again == before, f"{told}: planned or allocated again")
    if not listed:
        new = session.gemm(*operands[:2], **how)
        off = wrong(session, new, *zip(*both, strict=True))
        collective_assert(comm, not off and new.shape == operands[2].shape, f"{told}: new {new!r}: {off}")
