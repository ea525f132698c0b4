"""What ranks can share: cupy arrays of any allocator, GPUs without peer access, one GPU of two ranks."""

from __future__ import annotations

import contextlib
import functools
import resource
import sys
import threading

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers import products
from tests.helpers.collective import allgather, collective_assert, expect
from tests.helpers.products import Case, Operands, check_product, make_operands, moved_bytes, random_matrix, release
from uncut_mpi.model.dtypes import DType

OPTIONS = um.ScheduleOptions(scheduler="uncut", tile=16)


@pytest.fixture
def cupy():
    """The module, with this thread's current device as the test found it afterwards."""
    import cupy

    with cupy.cuda.Device():
        yield cupy


product = functools.partial(products.product, options=OPTIONS)


# -- cupy arrays ---------------------------------------------------------------------------------


def allocator(cupy, kind: str):
    if kind == "default pool":
        return cupy.get_default_memory_pool().malloc
    return cupy.cuda.malloc_managed if kind == "managed" else cupy.cuda.MemoryAsyncPool().malloc


def surrounded(cupy, malloc, data: np.ndarray, order: str, border: int):
    """Return a cupy array of NaN from this allocator, and the part of it inside a border, which holds `data`."""
    rows, cols = data.shape
    with cupy.cuda.using_allocator(malloc):
        whole = cupy.empty((rows + 2 * border, cols + 2 * border), data.dtype, order=order)
    whole.fill(np.nan)
    part = whole[border : border + rows, border : border + cols]
    part[...] = cupy.asarray(data)
    return whole, part


@pytest.mark.parametrize("kind", ["default pool", "stream-ordered pool", "managed"])
@pytest.mark.parametrize(("orders", "border"), [("FFF", 0), ("CFC", 0), ("FCF", 3), ("CCC", 2)])
def test_cupy_arrays_of_any_allocator_order_and_leading_dimension_are_multiplied(
    session, comm, cupy, kind, orders, border
):
    case = Case(65, 43, 57, place=("0", "h", str(comm.size - 1)), orders=orders)
    a, b, c = (
        random_matrix(*shape, DType.f64, (number,)) for number, shape in enumerate(((65, 57), (57, 43), (65, 43)))
    )
    malloc = allocator(cupy, kind)
    _, a_part = surrounded(cupy, malloc, a, orders[0], border) if session.rank == 0 else (None, None)
    mine = session.rank == session.size - 1
    c_whole, c_part = surrounded(cupy, malloc, c, orders[2], border) if mine else (None, None)
    host = session.empty_host(b.shape, order=orders[1])
    if session.rank == 0:
        host.array[...] = b
    operands = Operands(
        session.register(a_part, root=0), host, session.register(c_part, root=session.size - 1), a, b, c, []
    )
    exported = all(matrix.info.parts[0].handle is not None for matrix in (operands.a, operands.c))
    named = kind.split()[0] in operands.a.info.obstacle + operands.c.info.obstacle
    collective_assert(comm, exported if kind == "default pool" else named, f"{operands.a.info}, {operands.c.info}")
    session.poison_softbuf()
    with session.plan(*operands.abc, options=OPTIONS) as plan:
        result = plan.execute(case.alpha, case.beta)
    wanted = kind != "default pool" and comm.size > 1
    collective_assert(comm, result.staged == wanted, f"staged: {result.staged}")
    collective_assert(comm, ("C" in plan.summary.staged) == wanted, f"staged: {plan.summary.staged}")
    copied, listed = sum(allgather(comm, result.copy_bytes)), moved_bytes(plan.schedule)
    collective_assert(comm, copied == listed, f"{copied} bytes were copied, the schedule has {listed}")
    check_product(comm, case, operands)
    around = int(cupy.isnan(c_whole).sum()) if mine else 0
    collective_assert(comm, not mine or around == c_whole.size - c.size, f"{around} elements around C are NaN")
    release(session, operands)


def test_work_that_the_given_stream_holds_is_done_before_a_product_reads(session, comm, cupy):
    case = Case(64, 48, 56, place=("0", "h", "h"))
    operands = make_operands(session, case)
    stream = cupy.cuda.Stream(non_blocking=True)
    if session.rank == 0:
        data = cupy.asarray(operands.a_MK)
        operands.a.array.fill(np.nan)
        busy = cupy.full((4096, 4096), 2.0**-12)  # its own square
        busy @ busy  # what the first product needs is there
        cupy.cuda.Device().synchronize()
        with stream:
            for _ in range(10):
                busy = busy @ busy
            operands.a.array[...] = data
    session.gemm(*operands.abc, alpha=case.alpha, beta=case.beta, options=OPTIONS, stream=stream)
    check_product(comm, case, operands)
    release(session, operands)


@pytest.mark.one_node("products are done at once")
def test_what_a_stream_gets_behind_products_in_flight_finds_them_done_on_all_ranks(session, comm, cupy):
    """The host waits for none of them; each copies what all ranks have made, and ranks without work wait too."""
    size, rng = 840, np.random.default_rng(3)
    data = rng.random((2, size, size))
    a, b = (session.empty((size, size), "f64", um.Layout.rows()) for _ in range(2))
    for matrix, whole in zip((a, b), data, strict=True):
        matrix.local[...] = cupy.asarray(np.split(whole, comm.size)[comm.rank])
    results = [session.empty((size, size), "f64", um.Layout.whole(step % comm.size)) for step in range(6)]
    everywhere = [session.empty((size, size), "f64", um.Layout.replicated()) for _ in range(6)]
    for c in (*results, *everywhere):
        session.gemm(a, b, c)  # planned and bound
        c.local.fill(np.nan)
    stream = cupy.cuda.Stream(non_blocking=True)
    copies = []
    for c in (*results, *everywhere):
        handle = session.gemm(a, b, c, alpha=0.5, wait=False)
        handle.wait_on(stream)
        with stream:
            copies.append(c.local.copy())
    stream.synchronize()
    wanted = 0.5 * data[0] @ data[1]
    off = [float(abs(copy.get() - wanted).max()) for copy in copies if copy.size]
    # Two sums of k terms below 1, one after the other, each with an error below k² u.
    collective_assert(comm, max(off) <= 2 * size**2 * 2**-53, f"errors {off}")
    with pytest.raises(um.ParamError, match="stream = 'no stream'"):
        session.gemm(a, b, results[0], wait=False).wait_on("no stream")
    session.barrier()
    for one in (a, b, *results, *everywhere):
        session.release(one)


# -- devices -------------------------------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
@pytest.mark.multigpu(num=2)
def test_a_process_has_one_gpu_in_all_its_sessions(comm, session, open_session, cupy):
    mine = session._backend.identity().uuid
    part = comm.Split(comm.rank % 2, key=-comm.rank)
    with open_session(part) as other:
        theirs = other._backend.identity().uuid
    part.Free()
    uuids = allgather(comm, theirs)
    collective_assert(comm, theirs == mine and len(set(uuids)) == comm.size, f"{uuids}; here {mine}")


@pytest.mark.mpi(min_size=2)
@pytest.mark.multigpu(num=2)
@pytest.mark.one_node("no memory is shared with another node")
def test_memory_that_one_rank_cannot_map_is_everybodys_error(comm, open_session, cupy, monkeypatch):
    def refuse(handle, flags=0):
        raise cupy.cuda.runtime.CUDARuntimeError(1)

    last = comm.size - 1
    if comm.rank == last:
        monkeypatch.setattr(cupy.cuda.runtime, "ipcOpenMemHandle", refuse)
    parts = [f"rank {last}", "cannot be mapped", "cudaErrorInvalidValue", "--gpu-bind"]
    expect(comm, um.TopologyError, parts, lambda: open_session(comm))
    monkeypatch.undo()
    with open_session(comm) as session:
        wrong = product(session, Case(40, 30, 20, place=("0", "h", "0")))
    collective_assert(comm, not wrong, wrong)


def pairs(comm, cupy) -> list[int]:
    """Devices of ranks that are two on each, or more where GPUs are few."""
    return [rank // 2 % cupy.cuda.runtime.getDeviceCount() for rank in range(comm.size)]


@pytest.mark.mpi(min_size=2)
def test_two_ranks_on_one_gpu_need_permission(comm, open_session, cupy, pytestconfig):
    if pytestconfig.getoption("--share-gpus", default=False):
        pytest.skip("--share-gpus gives the permission")
    parts = ["ranks 0 and 1", "GPU-", "allow_shared_gpu"]
    expect(comm, um.TopologyError, parts, lambda: open_session(comm, devices=pairs(comm, cupy)))


@pytest.mark.mpi(min_size=2)
def test_two_ranks_on_one_gpu_multiply_rightly_when_allowed(comm, open_session, cupy):
    with open_session(comm, devices=pairs(comm, cupy), allow_shared_gpu=True) as session:
        wrong = [
            product(session, Case(65, 43, 57, place=place)) for place in (("h", "h", "h"), ("0", "h", "1"), ("1",) * 3)
        ]
        shared, names = session.devices_shared, session._backend.identity().uuid
    collective_assert(comm, shared and not any(wrong), f"shared {shared}; {wrong}")
    uuids = allgather(comm, names)
    devices = pairs(comm, cupy)
    collective_assert(comm, uuids == [uuids[devices.index(number)] for number in devices], f"{uuids}")


# -- memory that is taken ------------------------------------------------------------------------

LITTLE = 224 << 20  # of CUDA and cuBLAS: kernels that are loaded, and 32 MiB for each lane of each type


@contextlib.contextmanager
def taken(cupy, device, found):
    """Fill `found` with the most bytes that are taken meanwhile: ``"device"`` of it, ``"host"`` of this process."""
    with cupy.cuda.Device(device):
        cupy.cuda.Device().synchronize()
        free, resident = cupy.cuda.runtime.memGetInfo()[0], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found["device"], ended = 0, threading.Event()

        def watch():
            with cupy.cuda.Device(device):
                while not ended.wait(0.0005):
                    found["device"] = max(found["device"], free - cupy.cuda.runtime.memGetInfo()[0])

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()
            found["device"] = max(found["device"], free - cupy.cuda.runtime.memGetInfo()[0])
            found["host"] = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident)


@pytest.mark.mpi(min_size=2)
@pytest.mark.multigpu(num=2)
@pytest.mark.parametrize("memory", ["device", "host"])
@pytest.mark.parametrize("kind", ["rows", "cols", "cyclic"])
def test_no_memory_for_a_part_is_taken_that_is_there(comm, open_session, cupy, kind, memory):
    cyclic = um.Layout.block_cyclic(256, 256, (1, comm.size))
    layout = cyclic if kind == "cyclic" else getattr(um.Layout, kind)()
    wide = 4096 * comm.size  # so that a part is as large on any number of ranks
    a_shape, b_shape, c_shape, found = (wide, 16384), (16384, wide), (wide, wide), {}
    with open_session(comm, devices=[*range(comm.size)]) as session:
        shapes = a_shape, b_shape, c_shape
        a, b, c = (session.empty(one, "f64", layout, memory=memory) for one in shapes)
        for matrix in (a, b):
            matrix.local[...] = 1.5
        session.barrier()
        part_bytes = min(a.local.nbytes, b.local.nbytes)
        with taken(cupy, comm.rank, found):
            again = session.distribute(a.local, layout, shape=a_shape)
        nothing = max(found.values()) < LITTLE < part_bytes // 2
        collective_assert(comm, nothing, f"distribute took {found}, a part {part_bytes}")
        options = um.ScheduleOptions("kblocks")
        with taken(cupy, comm.rank, found):
            session.gemm(again, b, c, options=options)
        with session.plan(again, b, c, options=options) as plan:
            ours = max(plan.summary.softbuf_bytes)
        collective_assert(comm, found["device"] < ours + LITTLE, f"gemm took {found}, the SoftBuf {ours}")
        collective_assert(comm, found["host"] < LITTLE, f"gemm took {found}")
        with taken(cupy, comm.rank, found):
            session.gemm(again, b, c, options=options)
        collective_assert(comm, max(found.values()) < LITTLE // 16, f"gemm again took {found}")
        collective_assert(comm, bool((c.local == 1.5 * 1.5 * 16384).all()), "the product is wrong")


# -- cost ----------------------------------------------------------------------------------------


@pytest.mark.one_node("Python moves messages")
def test_python_runs_as_often_for_many_tasks_as_for_few(session, comm):
    operands = make_operands(session, Case(96, 96, 96, place=("0", "h", "0")))
    calls, tasks = [], []

    def count(frame, event, argument):
        if event == "call" and "/uncut_mpi/device/" in frame.f_code.co_filename:
            calls[-1] += 1

    for tile in (48, 8):
        with session.plan(*operands.abc, options=um.ScheduleOptions(scheduler="uncut", tile=tile)) as plan:
            plan.execute(1.2345, 0.5)
            calls.append(0)
            sys.setprofile(count)
            try:
                result = plan.execute(1.2345, 0.5)
            finally:
                sys.setprofile(None)
            tasks.append(sum(allgather(comm, result.tasks)))
    # Where a rank waits for others the report is made in steps, which takes two more.
    as_often = abs(calls[1] - calls[0]) in (0, 2)
    collective_assert(comm, as_often and tasks[1] > 10 * tasks[0], f"calls {calls}, tasks {tasks}")
    release(session, operands)
