"""Fixtures of tests that run on several ranks with the host backend."""

from __future__ import annotations

import functools
import pathlib

import pytest

import uncut_mpi as um
from tests.helpers.collective import collective_assert
from tests.helpers.sessions import opener

ON_TWO, ON_THREE, ON_FOUR = range(1, 3), range(1, 4), range(1, 5)
ALONE_AND_ON_THREE = (1, 3)
"""For what goes wrong on a rank: with three there is also one that is neither it nor the one that tells."""
IN_PAIRS = (1, 2, 4)
RANKS = {
    **dict.fromkeys(("test_api_arguments", "test_api_arrays", "test_odd_arguments"), ON_TWO),
    **dict.fromkeys(("test_api_measure", "test_api_references", "test_api_tuning", "test_bench"), ON_TWO),
    **dict.fromkeys(("test_command", "test_gemm_files"), ON_TWO),
    "test_api_random_arguments": (2,),
    **dict.fromkeys(("test_calibrate", "test_peers"), ON_THREE),
    **dict.fromkeys(("test_api_cut_short", "test_api_memory", "test_api_opening", "test_sessions"), ALONE_AND_ON_THREE),
    **dict.fromkeys(("test_file_matrices", "test_gemm_errors", "test_mixed_calls"), ALONE_AND_ON_THREE),
    **dict.fromkeys(("test_parts_memory", "test_random_arrays", "test_same_memory"), ALONE_AND_ON_THREE),
    **dict.fromkeys(("test_api_epochs", "test_api_trace", "test_fuzz"), ON_FOUR),
    # Four are a grid of two by two.
    **dict.fromkeys(("test_api_layouts", "test_api_matrices", "test_gemm_layouts"), IN_PAIRS),
    **dict.fromkeys(("test_complex", "test_interop", "test_out_of_core", "test_redistribute", "test_views"), IN_PAIRS),
}
"""On how many ranks files run: on others they take longer and do nothing else."""

RANKS_OF_TESTS = {
    # Types, transposes, scalars and edges are of each rank's own tasks.
    **dict.fromkeys(("every_transpose_and_order_with_leading_dimensions", "edges_of_size"), ON_TWO),
    **dict.fromkeys(("every_type_accumulates_and_rounds_as_it_should", "every_option_gives_the_right_product"), ON_TWO),
    **dict.fromkeys(("scalars_and_what_they_leave_unread", "more_than_5000_operations_on_one_lane"), ON_TWO),
    **dict.fromkeys(("large_products_with_every_transpose_type_and_order",), ON_TWO),
    **dict.fromkeys(("columns_that_are_not_aligned_are_copied_by_who_holds_them",), ON_TWO),
    # One rank does nothing that each of two does not.
    **dict.fromkeys(("every_op_in_every_order_is_right",), (2,)),
    # A machine of three ranks has what one of two has, and ports.
    **dict.fromkeys(("everything_is_measured_printed_and_kept_for_the_next_session",), ALONE_AND_ON_THREE),
    **dict.fromkeys(("large_products_at_edges_of_size", "large_products_from_the_corner"), ON_THREE),
    # What is dealt to ranks, or goes over another, is another thing on three and four.
    **dict.fromkeys(("tiles_that_are_dealt_out", "tiles_and_results_go_round_slow_links"), ON_FOUR),
    **dict.fromkeys(("bands_between_devices", "ranks_that_do_not_compute_hold_matrices"), ON_FOUR),
}
"""The same of single tests."""


def pytest_ignore_collect(collection_path: pathlib.Path) -> bool | None:
    """Leave out what is the same on so many ranks; None has pytest decide."""
    from mpi4py import MPI

    size = MPI.COMM_WORLD.size
    return True if size not in RANKS.get(collection_path.stem, (size,)) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that are the same on so many ranks."""
    from mpi4py import MPI

    size = MPI.COMM_WORLD.size
    names = {f"test_{name}" for name, ranks in RANKS_OF_TESTS.items() if size not in ranks}
    out = [item for item in items if item.originalname in names]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in out]


@pytest.fixture(scope="session")
def comm():
    """All ranks of the job."""
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.fixture(scope="session")
def backend_name():
    """The backend that this folder tests; the folder of GPU tests has another."""
    return "host"


@pytest.fixture(scope="session")
def open_session(backend_name):
    """Opens a session of this folder's backend."""
    return opener(backend_name)


@pytest.fixture(scope="session")
def agree_all(comm):
    """The only assertion between collective calls: `agree_all(ok, detail)` fails on all ranks, naming the guilty."""
    return functools.partial(collective_assert, comm)


@pytest.fixture(scope="module")
def session(comm):
    """A session with the host backend on a machine of equal links; schedules are proved before use."""
    machine = um.Machine.uniform(comm.size)
    with um.Session(comm, backend="host", machine=machine, timeout_s=30, verify=True) as session:
        yield session


@pytest.fixture
def two_ranks(comm):
    """For what takes long on more than two, as whole calibrations."""
    if comm.size > 2:
        pytest.skip("takes long with more than 2 ranks, and is the same")


@pytest.fixture
def group(comm):
    """A group of all ranks."""
    from uncut_mpi.spmd.group import Group

    group = Group(comm)
    yield group
    group.free()
