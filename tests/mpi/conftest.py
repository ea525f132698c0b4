"""Fixtures of tests that run on several ranks with the host backend."""

from __future__ import annotations

import functools
import os
import pathlib

import pytest

import uncut_mpi as um
from tests.helpers import jobs
from tests.helpers.collective import carried, collective_assert
from tests.helpers.sessions import (  # noqa: F401 (of every test)
    machine_cache,
    on_nodes,
    open_session,
    released,
)
from uncut_mpi.spmd import group as group_module

ALONE_AND_ON_THREE = (1, 3)
"""Of a file that is not named: of three ranks one neither errs or begins nor tells of it."""
FILES = {
    # Jobs of their own.
    (1,): "faults",
    # What is of each rank itself, or between two; commands, whose ranks do the same.
    (2,): """api_arguments api_arrays api_measure api_references api_tuning bench chunks command
        complex epilogues gemm_files gradients level3 messages odd_arguments out_of_core repeatable spmd_abort triangles
        usage watchdog""",
    # What one rank does, and the others are told.
    (3,): """api_cut_short api_epochs api_flags api_life api_matrices api_memory api_opening api_trace
        file_matrices gemm_errors interop mixed_calls nodes_attacked nodes_left parts_memory peers same_memory
        sessions spmd_agreement spmd_exchange spmd_group spmd_turns unpinned_memory""",
    (2, 3): "api_start same_sums",
    (1, 2, 3): "calibrate",
    # Four are a grid of two by two.
    (4,): "api_layouts blas nodes redistribute views",
    (1, 4): "blas_level3 gemm_layouts",
    (1, 2, 3, 4): "fuzz",
    # Eight are more than cores, and than a machine of four has.
    (1, 2, 4, 8): "gemm",
}
TESTS = {
    # Types, transposes, scalars and edges are of each rank's own tasks; what is said of a call depends on no number.
    (1, 2): """all_memory_is_closed_and_freed_before_the_backend_ends edges_of_size
        every_type_accumulates_and_rounds_as_it_should""",
    # Calls of BLAS are each process's own.
    (1,): """a_0_on_a_diagonal_divides_by_names_of_scipy every_routine_of_every_type_and_letter
        illegal_calls_and_what_a_session_refuses_are_those_of_the_library_behind
        memory_of_an_earlier_call_may_be_the_sessions_own_in_a_later_one names_of_scipy_for_all_routines
        what_does_not_fit_of_all_names_of_scipy without_alpha_nothing_but_c_is_read""",
    # A machine of three ranks has what one of two has, and ports.
    (1, 3): "everything_is_measured_printed_and_kept_for_the_next_session",
    (2,): """a_calibration_keeps_the_disk_for_sessions
        a_directory_that_cannot_be_made_is_an_error_that_names_the_flag
        a_machine_is_kept_whatever_happens_to_the_second_file
        a_machine_of_other_hardware_is_refused_on_every_rank a_plan_runs_with_other_scalars_and_arrays
        a_repeated_call_asks_the_device_for_nothing_but_to_run
        counted_tasks_and_bytes_equal_the_schedule
        large_products_with_every_transpose_type_and_order
        more_than_5000_operations_on_one_lane output_names_the_file_that_is_kept_and_json_one_more
        pairs_of_links_are_measured_where_there_is_time
        products_are_timed_beside_copies_within_a_device scalars_and_what_they_leave_unread
        the_disk_of_a_folder_is_measured_and_nothing_is_left_there
        the_quick_form_says_so_and_whether_the_machine_was_busy
        the_quick_form_says_that_it_takes_the_place_of_a_whole_one
        what_cannot_be_done_is_said_before_anything_is_measured
        what_holds_products_back_is_no_part_of_their_time""",
    (4,): "every_type_is_multiplied_in_every_layout ranks_that_do_not_compute_hold_matrices",
    (1, 4): "private_host_memory_of_a_rank",
}
RANKS, RANKS_OF_TESTS = (
    {f"test_{name}": ranks for ranks, names in table.items() for name in names.split()} for table in (FILES, TESTS)
)
"""On how many ranks files and single tests run: on others they take longer and find nothing else."""
ON_ANY = "UNCUT_TEST_ON_ANY" in os.environ
"""Whether all run on as many ranks as there are."""


def pytest_ignore_collect(collection_path: pathlib.Path) -> bool | None:
    """Leave out what is the same on so many ranks; None has pytest decide."""
    from mpi4py import MPI

    if ON_ANY or not collection_path.stem.startswith("test_"):
        return None
    return True if MPI.COMM_WORLD.size not in RANKS.get(collection_path.stem, ALONE_AND_ON_THREE) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that are the same on so many ranks."""
    from mpi4py import MPI

    size = MPI.COMM_WORLD.size
    names = {name for name, ranks in RANKS_OF_TESTS.items() if size not in ranks and not ON_ANY}
    out = [item for item in items if item.originalname in names]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in out]


@pytest.fixture(scope="session")
def backend_name():
    """The backend that this folder tests; the folder of GPU tests has another."""
    return "host"


@pytest.fixture(scope="session", autouse=True)
def sleeps_soon():
    """
    Have a rank with a core of its own sleep after a millisecond of waiting, as long each time as it otherwise would.

    Nearly all waits are for a rank that plans. Yielding meanwhile took a fifth of the time of both cores, which is for
    what runs beside these tests.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_module, "_YIELD_S", 1e-3)
        yield


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
def group(comm):
    """A group of all ranks."""
    from uncut_mpi.spmd.group import Group

    group = Group(comm)
    yield group
    group.free()


@pytest.fixture
def job_of_ranks(comm, tmp_path):
    """
    Runs a program on ranks of its own, and returns its output, the same on every rank.

    It has to end with a status, by default any but 0, and to say all that is given.
    """

    def run(program, *wanted, status=None, interpreter=(), ranks=2):
        said = None
        with carried(comm):
            if comm.rank == 0:
                path = tmp_path / "program.py"
                path.write_text(program)
                found, output, errors = jobs.ended(jobs.start([*interpreter, path], ranks))
                said = found, output + errors
        found, output = comm.bcast(said)
        good = found not in (None, 0) if status is None else found == status
        assert good, f"status {found} (None: it hung)\n{output}"
        assert [words for words in wanted if words not in output] == [], output
        return output

    return run


@pytest.fixture(params=["each alone", "two by two", "all but one"])
def per_node(comm, request):
    """How many ranks a node has; the last one has what is left."""
    each = {"each alone": 1, "two by two": 2, "all but one": comm.size - 1}[request.param]
    if comm.size <= max(each, 3 if request.param == "all but one" else 1):  # of three it is two by two
        pytest.skip(f"{comm.size} ranks on nodes of {each}")
    return each
