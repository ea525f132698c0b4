"""Markers of all tests, and what keeps ranks together when one of them fails."""

from __future__ import annotations

import functools
import gc
import os
import pathlib
import sys
import tempfile
import traceback

import pytest

from tests.helpers.collective import allgather
from uncut_mpi.spmd import launcher

# How long a rank that failed waits for the others to finish the same phase of the same test. They may
# wait for this very rank in a collective call, so past it the job ends, with the reason printed.
FAILED_RANK_PATIENCE_S = 20.0


def pytest_configure():
    rank = launcher.rank_of_process(unknown=-1)
    if rank >= 0:  # ranks that clean up one folder for temporary files get in each other's way
        own = pathlib.Path(tempfile.gettempdir(), f"uncut_mpi-{os.getuid()}-{rank}")
        own.mkdir(exist_ok=True)
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(own))


# -- markers -------------------------------------------------------------------------------------

OF_FOLDERS = {
    "mpi": [pytest.mark.mpi],
    "multigpu": [pytest.mark.mpi, pytest.mark.multigpu(num=1)],
    "gpu": [pytest.mark.gpu],
}
"""What every test of a folder is marked with that says nothing else: without a mark it would run nowhere."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    for item in items:
        for mark in OF_FOLDERS.get(item.path.parent.name, ()):
            if item.get_closest_marker(mark.name) is None:
                item.add_marker(mark)
        for mark in item.iter_markers("mpi"):
            _check_mpi_mark(item, mark)
        wanted = [mark_gpus(mark) for name in ("gpu", "multigpu") for mark in item.iter_markers(name)]
        if wanted and (why := missing_gpus(max(wanted))):
            item.add_marker(pytest.mark.skip(reason=why))
        for mark in item.iter_markers("one_node"):
            if on_several_nodes():
                item.add_marker(pytest.mark.skip(reason=f"several nodes: {mark.args[0]}"))


def pytest_collection_finish():
    # Tests that collect garbage would look at all that pytest has imported and collected again each time, 0.1 s.
    gc.collect()
    gc.freeze()


def _check_mpi_mark(item, mark):
    # pytest-mpi ignores what it does not know, so that a misspelt limit would run on too few ranks.
    unknown = set(mark.kwargs) - {"min_size"}
    if unknown or mark.args:
        raise pytest.UsageError(
            f"{item.nodeid}: the mpi marker takes min_size=N only, not {', '.join(sorted(unknown)) or mark.args}"
        )


def mark_gpus(mark):
    """Return how many GPUs a `gpu` or `multigpu` marker asks for."""
    if mark.name == "gpu":
        return 1
    return mark.kwargs.get("num", mark.args[0] if mark.args else 2)


@functools.cache
def on_several_nodes():
    """Whether the environment takes the ranks of the job for several nodes."""
    from mpi4py import MPI

    from tests.helpers.sessions import ranks_per_node

    return ranks_per_node(MPI.COMM_WORLD.size) < MPI.COMM_WORLD.size


def missing_gpus(wanted):
    """Return why `wanted` GPUs cannot be had, or "" if they can; any error of a GPU that is there is raised."""
    found = count_gpus()
    if found >= wanted:
        return ""
    return "no GPU" if found == 0 else f"{wanted} GPUs needed, {found} found"


@functools.cache
def count_gpus():
    """Return the number of CUDA devices; 0 only where the machine has none."""
    present = any(pathlib.Path("/dev").glob("nvidia[0-9]*")) or pathlib.Path("/dev/dxg").exists()
    try:
        import cupy
    except ModuleNotFoundError as error:
        if error.name != "cupy":
            raise
        if present:
            raise pytest.UsageError("there is an NVIDIA device but no cupy: install extra cuda12 or cuda13") from error
        return 0
    try:
        return cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        if present:
            raise
        return 0


# -- ranks stay together -------------------------------------------------------------------------


@pytest.fixture(scope="session")
def comm():
    """All ranks of the job."""
    from mpi4py import MPI

    return MPI.COMM_WORLD


@functools.cache
def _outcome_comm():
    from mpi4py import MPI

    return MPI.COMM_WORLD.Dup()


def _agreed_phase(item, phase):
    """Run one phase of a test and let all ranks share its outcome, so that none goes on alone."""
    if item.get_closest_marker("mpi") is None or not (item.config.option.only_mpi or item.config.option.with_mpi):
        return (yield)
    from uncut_mpi.spmd.abort import unlink_mpi_segments

    comm = _outcome_comm()
    error = result = None
    try:
        result = yield
    except Exception as caught:
        error = caught
    except pytest.skip.Exception as caught:
        error = caught
    except pytest.fail.Exception as caught:
        error = caught
    kind = "passed" if error is None else "skipped" if isinstance(error, pytest.skip.Exception) else "failed"
    text = "" if kind == "passed" else f"{type(error).__name__}: {error}"
    try:
        outcomes = allgather(comm, (kind, text), FAILED_RANK_PATIENCE_S if kind == "failed" else None)
    except TimeoutError:
        trace = "".join(traceback.format_exception(error, limit=-3))
        sys.__stderr__.write(
            f"\nrank {comm.rank} failed in {phase} of {item.nodeid}; the others still wait in it after "
            f"{FAILED_RANK_PATIENCE_S:g} s, so the job ends:\n{trace}\n"
        )
        sys.__stderr__.flush()
        unlink_mpi_segments()
        comm.Abort(1)
    if error is not None:
        raise error
    if any(outcome[0] != "passed" for outcome in outcomes):
        apart = "\n".join(f"rank {rank} {kind}: {text}" for rank, (kind, text) in enumerate(outcomes) if text)
        pytest.fail(f"{phase} passed here, but\n{apart}", pytrace=False)
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item):
    return (yield from _agreed_phase(item, "setup"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item):
    return (yield from _agreed_phase(item, "call"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item):
    return (yield from _agreed_phase(item, "teardown"))
