"""Results of GPUs are the same in every bit from run to run, also where other work keeps the GPUs busy."""

from __future__ import annotations

import contextlib
import functools
import random
import threading

import pytest

import uncut_mpi as um
from tests.mpi.test_repeatable import LAYOUTS, check_repeatable
from uncut_mpi.model.dtypes import DType


@contextlib.contextmanager
def busy_gpu(seed):
    """Multiply something else on this rank's GPU, for random times."""
    import cupy

    over, device = threading.Event(), cupy.cuda.runtime.getDevice()

    def work():
        rng = random.Random(seed)
        with cupy.cuda.Device(device), cupy.cuda.Stream(non_blocking=True) as stream:
            one = cupy.ones((2048, 2048), "f4")
            while not over.wait(rng.random() * 2e-3):
                for _ in range(rng.randint(1, 5)):
                    cupy.matmul(one, one)
                stream.synchronize()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.mpi(min_size=2)
@pytest.mark.multigpu(num=2)
@pytest.mark.parametrize("layouts", LAYOUTS)
def test_results_are_the_same_on_busy_gpus(comm, layouts):
    @contextlib.contextmanager
    def opened(busy):
        machine = um.Machine.uniform(comm.size)
        with um.Session(comm, backend="cuda", machine=machine, timeout_s=30) as session, contextlib.ExitStack() as load:
            if busy:
                load.enter_context(busy_gpu(comm.rank))
            yield session

    sessions = [functools.partial(opened, busy) for busy in (False, True, True)]
    check_repeatable(comm, sessions, layouts, (DType.f64, DType.f32, DType.f16), times=20)
