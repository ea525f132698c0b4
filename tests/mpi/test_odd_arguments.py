"""Arguments of the calls that make matrices: whole numbers of any kind are equal, and what is none is one error."""

from __future__ import annotations

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers.collective import collective_assert, expect
from tests.helpers.hostile import Closed


@pytest.mark.mpi(min_size=2)
def test_equal_values_of_different_kinds_are_equal_on_all_ranks(comm, session):
    mine = comm.rank % 2
    shape = [(3, 4), np.array([3, 4], np.uint8)][mine]
    dtype = ["f32", np.dtype("float32")][mine]
    rank = [1, np.int64(1)][mine]
    order = ["C", np.str_("C")][mine]
    array = np.ones((2, 2), "f4")
    made = [
        session.empty_host(shape, dtype, order=order),
        session.empty_device(list(shape), dtype, rank=rank, order=order),
        session.register(array, root=[1, np.array(1)][mine]),
        session.register(array, root=1, dtype=dtype),
    ]
    wanted = [(3, 4), (3, 4), (2, 2), (2, 2)]
    good = [matrix.shape for matrix in made] == wanted and {matrix.dtype.name for matrix in made} == {"f32"}
    collective_assert(comm, good, f"{made}")


@pytest.mark.mpi(min_size=2)
def test_an_odd_argument_on_one_rank_is_everybodys_error(comm, session):
    last = comm.rank == comm.size - 1
    who = f"rank {comm.size - 1}"
    for call in (
        lambda: session.register(np.ones((2, 2)), root="0" if last else 0),
        lambda: session.empty_host((2, "2" if last else 2)),
        lambda: session.empty_host((2, 2), order=Closed() if last else "C"),
        lambda: session.empty_device((2, 2), rank=None if last else 0),
    ):
        expect(comm, um.ParamError, [who], call)


@pytest.mark.mpi(min_size=2)
def test_ranks_that_name_different_roots_are_told_what_a_matrix_is(comm, session):
    mine = np.ones((2, 2))
    parts = ["root 0 on rank 0", "one matrix lies on one rank", "each rank has a part", "distribute"]
    expect(comm, um.RankMismatchError, parts, lambda: session.register(mine, root=comm.rank))
    shape = (3, 3)
    expect(comm, um.RankMismatchError, ["f32", "f64"], lambda: session.empty_host(shape, "f32" if comm.rank else "f64"))
