"""Numpy arrays in all kinds of host memory that programs have: page-locked, of files, parts of each other."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.collective import collective_assert, expect
from uncut_mpi import ParamError

SIZE = 512


def random(seed):
    return np.random.default_rng(seed).uniform(-1, 1, (SIZE, SIZE))


def check(comm, session, a, b, c, what):
    """C := A B with these arrays of rank 0 is right."""
    ours = session.rank == 0
    matrices = [session.register(array if ours else None, root=0) for array in (a, b, c)]
    session.gemm(*matrices)
    right = not ours or np.allclose(c, np.asarray(a) @ np.asarray(b), rtol=0, atol=1e-10)
    for matrix in matrices:
        session.release(matrix)
    collective_assert(comm, right, what)


def test_memory_that_the_program_has_page_locked_is_used_as_it_is(comm, session):
    cupyx = pytest.importorskip("cupyx")
    arrays = []
    for seed in range(3):
        arrays.append(cupyx.empty_pinned((SIZE, SIZE)))
        arrays[-1][...] = random(seed)
    check(comm, session, *arrays, "cupyx.empty_pinned")
    torch = pytest.importorskip("torch")
    check(comm, session, *(torch.from_numpy(random(seed)).pin_memory().numpy() for seed in range(3)), "pin_memory")


def refuse_registration(session, monkeypatch, arrays):
    """Make CUDA refuse to page-lock some arrays, as where there is too little memory (error 2)."""
    memory = session._backend._pinned
    register = memory._register
    spans = [(array.ctypes.data, array.ctypes.data + array.nbytes) for array in arrays]

    def refusing(first, end, kind):
        if any(start < end and first < stop for start, stop in spans):
            return 2
        return register(first, end, kind)

    monkeypatch.setattr(memory, "_register", refusing)


@pytest.mark.parametrize("which", ["abc", "a", "c"])
def test_arrays_that_cuda_cannot_page_lock_are_copied_by_a_worker(comm, session, monkeypatch, which):
    ours = comm.rank == 0
    a, b, c = (random(seed) for seed in range(3))
    c_before = c.copy()
    arrays = dict(zip("abc", (a, b, c), strict=True))
    refuse_registration(session, monkeypatch, [arrays[name] for name in which])
    matrices = [session.register(array if ours else None, root=0) for array in (a, b, c)]
    runtime = session._backend._runtime
    unlocked = [name for name in "abc" if runtime.pointerGetAttributes(arrays[name].ctypes.data).type == 0]
    wrong, staged = [], []
    with session.plan(*matrices) as plan:
        for call in range(3):
            c[...] = c_before
            a[...] = random(10 + call)
            session.barrier()
            session.poison_softbuf()
            staged.append(plan.execute(1.5, 0.5).staged)
            wrong.append(ours and not np.allclose(c, 1.5 * a @ b + 0.5 * c_before, rtol=0, atol=1e-10))
            session.barrier()
    for matrix in matrices:
        session.release(matrix)
    collective_assert(comm, not ours or unlocked == list(which), f"not page-locked: {unlocked}")
    collective_assert(comm, all(staged) and plan.summary.staged == which.upper(), f"{staged} {plan.summary.staged}")
    collective_assert(comm, not any(wrong), f"calls that were wrong: {wrong}")


def test_an_array_of_which_the_program_has_page_locked_a_part_is_copied_by_a_worker(comm, session):
    a, b, c = (random(seed) for seed in range(3))
    ours, runtime = comm.rank == 0, session._backend._runtime
    part = a[100:200]
    if ours:
        runtime.hostRegister(part.ctypes.data, part.nbytes, 0)
    try:
        matrices = [session.register(array if ours else None, root=0) for array in (a, b, c)]
        session.poison_softbuf()
        session.gemm(*matrices)
        for matrix in matrices:
            session.release(matrix)
    finally:
        if ours:
            runtime.hostUnregister(part.ctypes.data)
    right = not ours or np.allclose(c, a @ b, rtol=0, atol=1e-10)
    collective_assert(comm, right and matrices[0].info.obstacle != "", f"{right}, {matrices[0].info}")


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_mapped_files_are_operands(comm, session, tmp_path, mode):
    random(1).tofile(tmp_path / "a")
    a = np.memmap(tmp_path / "a", np.float64, mode, shape=(SIZE, SIZE))
    check(comm, session, a, random(2), random(3), f"mode {mode}")
    if mode == "r":
        matrix = session.register(a if session.rank == 0 else None, root=0)
        other = session.empty_host((SIZE, SIZE))
        expect(comm, ParamError, ["read-only"], lambda: session.gemm(other, other, matrix))
        session.release(matrix)
        session.release(other)


def test_parts_of_a_matrix_are_registered_before_and_after_the_whole(comm, session):
    data, b = random(1), random(2)
    ours = session.rank == 0
    part = session.register(data[:100] if ours else None, root=0)
    whole = session.register(data if ours else None, root=0)
    inner = session.register(data[50:150] if ours else None, root=0)
    other = session.register(b if ours else None, root=0)
    found = []
    for matrix, rows in ((part, slice(0, 100)), (whole, slice(None)), (inner, slice(50, 150))):
        c = session.gemm(matrix, other)
        found.append(not ours or np.allclose(c.array, data[rows] @ b, rtol=0, atol=1e-10))
        session.release(c)
    session.release(whole)
    c = session.gemm(inner, other)
    found.append(not ours or np.allclose(c.array, data[50:150] @ b, rtol=0, atol=1e-10))
    runtime = session._backend._runtime
    still = not ours or runtime.pointerGetAttributes(data[100:].ctypes.data).type != 0
    for matrix in (part, inner, other, c):
        session.release(matrix)
    gone = not ours or runtime.pointerGetAttributes(data.ctypes.data).type == 0
    collective_assert(comm, all(found) and still and gone, f"{found} {still} {gone}")


def test_two_sessions_have_one_array(comm, open_session):
    data = random(1)
    with open_session(comm) as one, open_session(comm) as two:
        ours = comm.rank == 0
        first = one.register(data if ours else None, root=0)
        second = two.register(data if ours else None, root=0)
        one.release(first)
        c = two.gemm(second, second)
        right = not ours or np.allclose(c.array, data @ data, rtol=0, atol=1e-10)
        still = not ours or two._backend._runtime.pointerGetAttributes(data.ctypes.data).type != 0
    collective_assert(comm, right and still, f"{right} {still}")


def test_small_arrays_that_share_pages_are_operands(comm, session):
    block = np.zeros(3 * 40 * 40 + 7)
    a, b, c = (block[7 + i * 1600 : 7 + (i + 1) * 1600].reshape(40, 40) for i in range(3))
    a[...], b[...] = random(1)[:40, :40], random(2)[:40, :40]
    check(comm, session, a, b, c, "neighbours")
