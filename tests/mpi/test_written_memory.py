"""Calls that write memory of a caller make the checks of products; each public name says whether it writes any."""

from __future__ import annotations

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers.collective import collective_assert, expect
from tests.helpers.products import array_of
from tests.helpers.sessions import ranks_per_node

EDGE = 8

WRITES = {
    "Session.gemm": lambda session, a, c: session.gemm(a, a, c),
    "Session.gemm_batch": lambda session, a, c: session.gemm_batch([a, a], a, [c, c]),
    "Session.plan": lambda session, a, c: session.plan(a, a, c),
    "Session.redistribute": lambda session, a, c: session.redistribute(a, None, out=c),
    "Session.herk": lambda session, a, c: session.herk(a, c),
    "Session.her2k": lambda session, a, c: session.her2k(a, a, c),
    "Session.syrk": lambda session, a, c: session.syrk(a, c),
    "Session.syr2k": lambda session, a, c: session.syr2k(a, a, c),
    "Session.symm": lambda session, a, c: session.symm(a, a, c),
    "Session.hemm": lambda session, a, c: session.hemm(a, a, c),
    "Session.trmm": lambda session, a, c: session.trmm(a, c),
    "Session.trsm": lambda session, a, c: session.trsm(a, c),
    "Session.upload": lambda session, a, c: session.upload(a, c),
    "GemmPlan.execute": lambda session, a, c: planned(session).execute(a=a, b=a, c=c),
    "GemmPlan.trace": lambda session, a, c: planned(session).trace(a=a, b=a, c=c),
}
"""How each makes C of A."""

NEW_MEMORY = """Session.matmul Session.scatter Session.gather Session.download Session.empty Session.empty_host
Session.empty_device Session.create_file"""
NO_ELEMENTS = """Session.agree Session.barrier Session.broken Session.close Session.commit
Session.distribute Session.distribute_parts
Session.energy_j Session.from_dtensor Session.from_jax Session.gather_values Session.open_file Session.poison_softbuf
Session.rank Session.register Session.release Session.size Session.together Session.versions
Matrix.H Matrix.T Matrix.address Matrix.array Matrix.arrays_here Matrix.dtype Matrix.end Matrix.layout Matrix.local
Matrix.local_indices
Matrix.location Matrix.memory Matrix.order Matrix.own_part Matrix.rectangles Matrix.shape Matrix.to_dtensor
Matrix.to_jax Matrix.whole
Batch.H Batch.T Batch.along Batch.array Batch.base Batch.closed Batch.dtype Batch.is_whole Batch.layout Batch.local
Batch.location Batch.mT Batch.memory Batch.order Batch.shape
GemmPlan.close GemmPlan.closed GemmPlan.placement GemmPlan.problem GemmPlan.progress GemmPlan.schedule GemmPlan.summary
GemmPlan.tuning"""


def planned(session):
    return session.plan(*(session.empty_host((EDGE, EDGE)) for _ in "abc"))


def a_view(session, path):
    whole = session.empty_host((EDGE + 3, EDGE))
    return whole[:EDGE], whole[3:]


def registered_again(session, path):
    a = session.empty_host((EDGE, EDGE))
    return a, session.register(a.array if session.rank == 0 else None, root=0)


def seen_of(matrix, first=0, end=EDGE):
    """Return lines of a matrix in host memory, or as many of others where this rank does not see it."""
    array = array_of(matrix)
    return np.zeros((end - first, EDGE)) if array is None else array[first:end]


def dealt_of_it(session, path):
    a = session.empty_host((EDGE, EDGE))
    there = np.array_split(np.arange(EDGE), session.size)[session.size - 1 - session.rank]
    return a, session.distribute(seen_of(a, there[0], there[-1] + 1), um.Layout.rows())


def parts_of_one_rank(session, path):
    own = np.zeros((EDGE, EDGE))
    given = [(own[:5], (0, 0)), (own[4:7], (5, 0))] if session.rank == 0 else []
    return session.empty_host((EDGE, EDGE)), session.distribute_parts(given, shape=(EDGE, EDGE))


def replicas_in_one_memory(session, path):
    a, c = (session.empty_host((EDGE, EDGE)) for _ in "ac")
    return a, session.distribute(seen_of(c), um.Layout.replicated())


def read_only(session, path):
    array = np.zeros((EDGE, EDGE))
    array.flags.writeable = False
    return session.empty_host((EDGE, EDGE)), session.register(array if session.rank == 0 else None, root=0)


def shortened_file(session, path):
    c = session.create_file(path, (EDGE, EDGE), "f64", order="C")
    session.barrier()
    if session.rank == 0:
        with open(path + ".partial", "r+b") as file:
            file.truncate(200)
    session.barrier()
    return session.empty_host((EDGE, EDGE)), c


WAYS = {
    a_view: (um.ParamError, "overlaps"),
    registered_again: (um.ParamError, "overlaps"),
    dealt_of_it: (um.ParamError, "overlaps"),
    parts_of_one_rank: (um.ParamError, "overlap in memory (rank 0)"),
    replicas_in_one_memory: (um.ParamError, "overlap in memory"),
    read_only: (um.ParamError, "read-only"),
    shortened_file: (um.DataFileError, "shorter"),
}


def test_each_public_name_says_whether_it_writes_memory_of_the_caller(comm):
    found = {
        f"{kind.__name__}.{name}"
        for kind in (um.Session, um.Matrix, um.Batch, um.GemmPlan)
        for name in dir(kind)
        if not name.startswith("_")
    }
    known = {*WRITES, *NEW_MEMORY.split(), *NO_ELEMENTS.split()}
    collective_assert(comm, found == known, f"to be put into one of the three: {sorted(found ^ known)}")


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_whoever_writes_makes_the_checks_of_products(comm, session, mpi_tmp_path, way):
    if ranks_per_node(comm.size) == 1 and way is replicas_in_one_memory:
        return
    kind, text = WAYS[way]
    a, c = way(session, str(mpi_tmp_path / "c.npy"))
    for name, call in WRITES.items():
        if name.startswith("GemmPlan") and (c.info.in_parts or c.location != a.location):
            continue  # which does not fit the plan
        if name in ("Session.plan", "Session.gemm_batch") and way is shortened_file:
            continue  # which reads and writes nothing yet, or takes no files
        expect(comm, kind, [text], lambda call=call: call(session, a, c))
