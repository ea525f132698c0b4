"""Other libraries' products: their processes, how they are asked, and that they multiply what they were given."""

from __future__ import annotations

import functools
import io
import json
import os
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.helpers.baselines import expected, make_task
from uncut_mpi.bench import processes
from uncut_mpi.bench.baselines.job import as_cyclic
from uncut_mpi.bench.baselines.library import Library, LibraryProduct, Unsupported
from uncut_mpi.bench.baselines.serve import _Server, load, serve
from uncut_mpi.bench.baselines.task import words
from uncut_mpi.bench.processes import BASELINES, BaselineError, BaselineProcess, environment
from uncut_mpi.device.cuda.library import import_cupy
from uncut_mpi.model.cyclic import Cyclic
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.layout import Layout


@functools.cache
def mpi_of_jobs():
    """Return what the MPI library says that it is, as another process hears it: here MPI is not to be started."""
    said = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
    return subprocess.run([sys.executable, "-c", said], check=True, capture_output=True, text=True, timeout=60).stdout


@pytest.fixture(autouse=True)
def no_mpi_here(monkeypatch):
    monkeypatch.setattr(processes, "library_version", mpi_of_jobs)


class Counting(Library):
    """A library whose settings take as many pretended seconds as their names say."""

    version = "Counting 1"

    def __init__(self, settings, broken=()):
        self.product = CountingProduct(settings, broken)

    def open(self, task, matrices):
        self.product.matrices = matrices
        return self.product


class CountingProduct(LibraryProduct):
    def __init__(self, settings, broken):
        self.settings, self.broken, self.calls, self.events = settings, broken, [], []

    def call(self, setting):
        if setting in self.broken:
            raise MemoryError(f"no room for {setting}")
        self.calls.append(setting)
        self.events.append("call")

    def reset(self):
        self.events.append("reset")

    def store(self):
        self.events.append("store")
        self.matrices.out.fill(1)

    def close(self):
        self.events.append("close")


@pytest.fixture
def pretended(monkeypatch):
    """Calls take the time that the setting's name says."""

    def timed(self, product, setting):
        product.call(setting)
        return float(setting)

    monkeypatch.setattr(_Server, "_timed", timed)


def converse(library, *messages):
    answers = io.BytesIO()
    serve(io.BytesIO(b"".join(map(words, messages))), answers, lambda: library)
    return [json.loads(line) for line in answers.getvalue().splitlines()]


def begin(task):
    return {"do": "begin", "task": task.to_json()}


# -- asking ----------------------------------------------------------------------------------------


def test_the_best_setting_is_kept_and_hopeless_ones_are_tried_once(pretended):
    library = Counting(["3", "2", "4", "2.5"])
    with make_task(2, 2, 2, DType.f64, (None,) * 3, (0,)) as (task, matrices):
        begun, timed, ended = converse(library, begin(task), {"do": "time", "count": 2}, {"do": "end"})
        assert (matrices.out == 1).all()
    assert begun == {
        "library": "Counting 1",
        "setting": "2",
        "settings": {"3": 3.0, "2": 2.0, "4": 4.0, "2.5": 2.5},
        "failed": {},
        "first_s": 3.0,
        "call_s": 2.0,
    }
    assert timed == {"samples_s": [2.0, 2.0]}
    assert ended == {}
    # One call more each than is timed, and 4 is too far from 2 to be tried again.
    assert library.product.calls == ["3"] * 4 + ["2"] * 4 + ["4"] * 2 + ["2.5"] * 4 + ["2"] * 3
    assert library.product.events[-4:] == ["reset", "call", "store", "close"]


def test_a_setting_that_fails_leaves_the_others_and_all_failing_is_said(pretended):
    with make_task(2, 2, 2, DType.f64, (None,) * 3, (0,)) as (task, _):
        (begun,) = converse(Counting(["1", "2"], broken=("1",)), begin(task))
        assert begun["setting"] == "2"
        assert list(begun["settings"]) == ["2"]
        assert begun["failed"] == {"1": "no room for 1"}
        # Whatever it was may go on failing, so nothing more is asked of this process.
        (failed,) = converse(Counting(["1", "2"], broken=("1", "2")), begin(task), {"do": "time", "count": 1})
    assert failed == {"error": "RuntimeError: 1: no room for 1; 2: no room for 2", "ends": True}


class Refusing(Counting):
    """A library that has no products."""

    def open(self, task, matrices):
        raise Unsupported("no such product")


def test_what_a_library_does_not_have_leaves_its_process_alive(pretended):
    with make_task(2, 2, 2, DType.f64, (None,) * 3, (0,)) as (task, _):
        answers = converse(Refusing([]), begin(task), {"do": "time", "count": 1})
    assert answers == [{"error": "no such product", "ends": False}, {"error": "no task was begun", "ends": False}]


def test_a_product_that_cannot_be_freed_ends_its_process(pretended, monkeypatch):
    def stuck(self):
        raise OSError("stuck")

    monkeypatch.setattr(CountingProduct, "close", stuck)
    with make_task(2, 2, 2, DType.f64, (None,) * 3, (0,)) as (task, _):
        _, last = converse(Counting(["1"]), begin(task), begin(task), begin(task))
        assert last == {"error": "OSError: stuck", "ends": True}


# -- processes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(set(BASELINES) - {"numpy", "pdgemm"}))
def test_a_library_that_is_not_installed_says_what_is_missing(name, monkeypatch):
    modules = {"jax": "jax", "scipy": "scipy.linalg.blas", **dict.fromkeys(("torch", "dtensor", "cublasmp"), "torch")}
    wanted = modules.get(name, "cupy")
    monkeypatch.setitem(sys.modules, wanted, None)  # as if it were not there
    import_cupy.cache_clear()
    with pytest.raises(Unsupported, match="needs cupy" if wanted == "cupy" else "is not installed"):
        load(name, "cuda", 1)
    import_cupy.cache_clear()


def test_a_library_of_several_processes_that_is_not_installed_says_so(monkeypatch):
    for name in ("PYTHONPATH", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    started = BaselineProcess("cublasmp", "cuda", ["GPU-a", "GPU-b"])
    with pytest.raises(BaselineError, match=r"PyTorch is not installed|does not see a GPU for each of 2 ranks"):
        started.ask({"do": "begin"})
    assert started.alive
    started.close()


def test_a_process_computes_what_it_is_asked():
    with make_task(40, 30, 20, DType.f64, (None,) * 3, (0,)) as (task, matrices):
        process = BaselineProcess("numpy", "host", ["0", "1"])
        begun = process.ask(begin(task))
        assert begun["library"].startswith(f"NumPy {np.__version__}")
        assert len(process.ask({"do": "time", "count": 3})["samples_s"]) == 3
        process.ask({"do": "end"})
        np.testing.assert_allclose(matrices.out, expected(task, matrices), rtol=0, atol=1e-14)
        process.close()
        process.close()
        assert not process.alive


def test_a_process_of_a_bound_rank_has_all_cores():
    ours = os.sched_getaffinity(0)
    if len(ours) < 2:
        pytest.skip("one core")
    os.sched_setaffinity(0, {min(ours)})
    try:
        process = BaselineProcess("numpy", "host", ["0"])
        assert os.sched_getaffinity(0) == {min(ours)}
        with make_task(8, 8, 8, DType.f64, (None,) * 3, (0,)) as (task, _):
            threads = int(process.ask(begin(task))["setting"].split()[0])
        assert threads >= len(ours)
        process.close()
    finally:
        os.sched_setaffinity(0, ours)


def test_a_library_without_such_a_product_says_so_and_lives_on():
    with make_task(4, 4, 4, DType.f16, (None,) * 3, (0,)) as (task, _):
        process = BaselineProcess("numpy", "host", ["0"])
        with pytest.raises(BaselineError, match="NumPy multiplies f16 without a BLAS"):
            process.ask(begin(task))
        assert process.alive
        process.close()


def test_a_process_that_ends_is_named_with_its_last_words():
    process = BaselineProcess("numpy", "host", ["0"])
    process._process.kill()
    with pytest.raises(BaselineError, match="the process of numpy ended with status -9: it said nothing"):
        process.ask({"do": "begin"})
    assert not process.alive


def test_of_several_processes_the_first_that_fails_is_told_and_none_is_waited_for(monkeypatch):
    monkeypatch.setattr(processes, "_END_S", 0.2)
    started = BaselineProcess("numpy", "host", ["0"])
    started._count, others = 2, []
    for _ in range(2):
        ours, other = socket.socketpair()
        started._lines[ours] = ours.makefile("rb")
        others.append(other)
    others[0].sendall(words({"samples_s": [1.0]}))
    others[1].sendall(words({"samples_s": [1.0]}))
    assert started.ask({"do": "time"}) == {"samples_s": [1.0]}
    others[1].sendall(words({"error": "no room", "ends": False}))
    began = time.monotonic()
    with pytest.raises(BaselineError, match="no room"):
        started.ask({"do": "time"})
    assert time.monotonic() - began < 5
    assert not started.alive
    assert [other.recv(100) for other in others] == [words({"do": "time"}) * 2] * 2
    assert [other.recv(100) for other in others] == [b"", b""]  # and are told that nobody asks any more
    for other in others:
        other.close()


def test_the_environment_has_all_devices_and_nothing_of_the_job():
    ours = {
        "PATH": "/bin",
        "PMI_RANK": "0",
        "OMPI_COMM_WORLD_RANK": "0",
        "SLURM_PROCID": "0",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "3",
    }
    found = environment(ours, "cuda", ["GPU-b", "GPU-a", "GPU-b"])
    assert found == {"PATH": "/bin", "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "CUDA_VISIBLE_DEVICES": "GPU-b,GPU-a"}
    found = environment(ours, "host", ["0", "1", "2"])
    assert found["CUDA_VISIBLE_DEVICES"] == ""
    assert found["JAX_PLATFORMS"] == "cpu"
    assert found["XLA_FLAGS"] == "--xla_force_host_platform_device_count=3"


@pytest.mark.parametrize(
    ("library", "place", "said"),
    [
        ((True, False), ("rows", "rows", "rows"), "it multiplies matrices that lie in one memory each"),
        ((False, True), (None, None, None), "it multiplies matrices that are dealt to ranks"),
        ((True, True), ("rows", None, None), "it multiplies matrices that are dealt to ranks"),
        ((True, True), ("rows", "cols", "rows"), None),
    ],
)
def test_matrices_that_a_library_does_not_take_are_said(pretended, library, place, said):
    counting = Counting(["1"])
    counting.takes_whole, counting.takes_dealt = library
    with make_task(2, 2, 2, DType.f64, place, (0,)) as (task, _):
        (answer,) = converse(counting, begin(task))
    assert answer.get("error") == said
    assert answer.get("setting") == (None if said else "1")


def test_a_layout_is_block_cyclic_if_every_process_has_just_that():
    cyclic = Layout.block_cyclic(3, 2, (2, 2), source=(1, 0), grid_order="C")
    assert as_cyclic(cyclic, (10, 9), 4) == cyclic.cyclic
    assert as_cyclic(Layout.rows((3, 4, 3)), (10, 9), 3) is None
    assert as_cyclic(Layout.rows((4, 4, 2)), (10, 9), 3) == Cyclic((4, 9), (3, 1))
    assert as_cyclic(Layout.cols(), (10, 9), 3) == Cyclic((10, 3), (1, 3))
    assert as_cyclic(Layout.blocks((6, 4), (5, 4)), (10, 9), 4) == Cyclic((6, 5), (2, 2))
    assert as_cyclic(Layout.blocks((4, 6), (5, 4)), (10, 9), 4) is None
    assert as_cyclic(Layout.rows(ranks=(1, 0)), (10, 9), 2) is None
