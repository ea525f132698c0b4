"""Products of matrices that stay in files, through little host memory."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import resource
import threading
import time

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers import jobs
from tests.helpers.collective import carried, collective_assert, expect, once
from tests.helpers.distributed import made_of, part_of
from tests.helpers.products import ones, set_matrix, shared_of, shows
from tests.helpers.sessions import memories
from uncut_mpi.api import plan_maker
from uncut_mpi.device.files import FileWindow

ROOM = 150_000
"""Bytes of host memory of each rank: a fifth of a matrix or less, where they are of the usual size."""

MOST_S = 10.0
"""Within which a failure ends a call on all ranks, whatever they wait for."""


@pytest.fixture
def folder(mpi_tmp_path, comm):
    comm.Barrier()
    return mpi_tmp_path


def save(comm, path, array):
    """Write a matrix file, once."""
    once(comm, lambda: np.save(path, array))
    return str(path)


def matrices(seed, m, n, k):
    """Return random A, B and C, the same on all ranks."""
    rng = np.random.default_rng(seed)
    return [rng.uniform(-1, 1, shape) for shape in ((m, k), (k, n), (m, n))]


def close(found, wanted, k):
    """Return whether a product of float64 is as good as sums of k terms of at most 1 allow."""
    return bool(np.abs(found - wanted).max(initial=0) <= 8 * k * 2.0**-53 * (k + 1))


@pytest.mark.parametrize("room", [None, ROOM])
def test_files_of_any_order_are_multiplied_where_they_are(comm, open_session, folder, room):
    rng = random.Random(3)
    with open_session(comm, host_memory=room, verify=True) as session:
        for number in range(6):
            m, n, k = (rng.randint(150, 400) for _ in range(3))
            arrays = matrices(number, m, n, k)
            orders = [rng.choice("FC") for _ in range(3)]
            trans = [rng.choice("NT") for _ in range(2)]
            paths = []
            for name, array, order, op in zip("ABC", arrays, orders, (*trans, "N"), strict=True):
                stored = array.T if op == "T" else array
                paths.append(save(comm, folder / f"{name}{number}.npy", np.array(stored, order=order)))
            a, b = (session.open_file(path) for path in paths[:2])
            c = session.open_file(paths[2], mode="r+")
            session.gemm(a, b, c, alpha=1.5, beta=-0.5, trans_a=trans[0], trans_b=trans[1])
            wanted = 1.5 * arrays[0] @ arrays[1] - 0.5 * arrays[2]
            good = close(np.load(paths[2]), wanted, k) and shows(session.download(c), np.load(paths[2]))
            same = all(
                np.array_equal(np.load(path), array.T if op == "T" else array)
                for path, array, op in zip(paths[:2], arrays[:2], trans, strict=True)
            )
            collective_assert(comm, good and same, f"{number}: {m}x{n}x{k} {orders} {trans}")
            for matrix in (a, b, c):
                session.release(matrix)


@pytest.mark.parametrize("which", range(3))
@pytest.mark.on_nodes
def test_each_of_the_three_may_be_in_a_file_and_results_are_new_matrices(comm, open_session, folder, which):
    m, n, k = 220, 180, 260
    arrays = matrices(which, m, n, k)
    with open_session(comm, host_memory=ROOM, verify=True) as session:
        given = []
        for at, array in enumerate(arrays):
            if at == which:
                path = save(comm, folder / "x.npy", array)
                given.append(session.open_file(path, mode="r+" if at == 2 else "r"))
            else:
                given.append(shared_of(session, array))
        session.gemm(*given, beta=1.0)
        near = functools.partial(close, k=k)
        found = session.download(given[2])
        collective_assert(comm, shows(found, arrays[0] @ arrays[1] + arrays[2], near), "in place")
        if which < 2:
            made = session.download(session.gemm(*given[:2]))
            collective_assert(comm, shows(made, arrays[0] @ arrays[1], near), "a new matrix")


@pytest.mark.parametrize(("dtype", "unit"), [("float32", 2.0**-24), ("float16", 2.0**-11), ("complex64", 2.0**-22)])
def test_files_of_other_types(comm, open_session, folder, dtype, unit):
    m, n, k = 160, 140, 120
    a, b, _ = (array.astype(dtype) for array in matrices(9, m, n, k))
    paths = [
        save(comm, folder / f"{name}.npy", array)
        for name, array in (("a", a), ("b", b), ("c", np.zeros((m, n), dtype)))
    ]
    with open_session(comm, host_memory=ROOM // 4, verify=True) as session:
        c = session.open_file(paths[2], mode="r+")
        session.gemm(session.open_file(paths[0]), session.open_file(paths[1]), c)
        found = np.load(paths[2]).astype(np.complex128)
        wanted = a.astype(np.complex128) @ b.astype(np.complex128)
        # Sums of k terms of at most 1 are at most k, and so is what each addition rounds.
        collective_assert(comm, np.abs(found - wanted).max() <= unit * (k**1.5 + np.abs(wanted).max()), dtype)


def test_views_of_files_are_multiplied_and_moved(comm, open_session, folder):
    a, b, c = matrices(4, 210, 190, 230)
    paths = [save(comm, folder / f"{name}.npy", array) for name, array in zip("abc", (a, b, c), strict=True)]
    with open_session(comm, host_memory=ROOM, verify=True) as session:
        files = [session.open_file(path, mode="r+") for path in paths]
        session.gemm(files[0][10:200, :220], files[1][5:225, 3:150], files[2][7:197, 1:148])
        c[7:197, 1:148] = a[10:200, :220] @ b[5:225, 3:150]
        collective_assert(comm, close(np.load(paths[2]), c, 230), "a view of each")
        moved = session.redistribute(files[0].T, um.Layout.rows())
        (first, last), (_, columns) = moved.rectangles[0]
        collective_assert(comm, np.array_equal(moved.local, a.T[first:last, :columns]), "redistribute")
        host = session.empty_host(c.shape)
        set_matrix(session, host, 3.0)
        session.barrier()
        session.upload(host, files[2])
        collective_assert(comm, bool((np.load(paths[2]) == 3.0).all()), "upload")


@pytest.mark.parametrize("order", ["F", "C"])
def test_a_new_file_takes_a_result(comm, open_session, folder, order):
    a, b, _ = matrices(11, 210, 190, 230)
    paths = [save(comm, folder / f"{name}.npy", array) for name, array in (("a", a), ("b", b))]
    with open_session(comm, host_memory=ROOM, verify=True) as session:
        c = session.create_file(folder / "c.npy", (210, 190), "f64", order=order)
        with open(folder / "c.npy.partial", "rb") as file:
            made = np.load(file)
        collective_assert(comm, made.shape == (210, 190) and not made.any() and c.order == order, str(made.shape))
        comm.Barrier()
        session.gemm(*map(session.open_file, paths), c)
        collective_assert(comm, not (folder / "c.npy").exists(), "an unfinished file has its name")
        flushed = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FileWindow, "flush", lambda window: flushed.append(window.path))
            for _ in range(2):
                session.commit(c)
            session.commit(session.open_file(paths[0]))
        wanted = [str(folder / "c.npy")] * 2 + [paths[0]]
        collective_assert(comm, flushed == wanted, f"what was written later is not brought to the disk: {flushed}")
        found = np.load(folder / "c.npy")
        collective_assert(comm, close(found, a @ b, 230) and found.flags.f_contiguous == (order == "F"), "a result")
        again = functools.partial(session.create_file, folder / "c.npy", (3, 3), "f64")
        expect(comm, um.DataFileError, ["c.npy exists", "pass overwrite=True"], again)
        nowhere = functools.partial(session.create_file, folder / "none" / "c.npy", (3, 3), "f64")
        expect(comm, um.DataFileError, ["cannot be created"], nowhere)
        huge = functools.partial(session.create_file, folder / "d.npy", (1 << 24, 1 << 24), "f64")
        expect(comm, um.CapacityError, ["d.npy needs", "available"], huge)
        comm.Barrier()
        collective_assert(comm, not (folder / "d.npy").exists(), "what has no room is left")
        lost = session.create_file(folder / "l.npy", (5, 5), "f64")
        if session.rank == 0:
            (folder / "l.npy").write_text("somebody else's")
        expect(comm, um.DataFileError, ["l.npy", "appeared meanwhile"], lambda: session.commit(lost))
        for call in (session.commit, session.download, lambda one: session.gemm(one, one)):
            expect(comm, um.DataFileError, ["could not be completed and is gone"], functools.partial(call, lost))
        session.release(lost)
        half = session.create_file(folder / "h.npy", (5, 4), "bf16")
        collective_assert(comm, half.dtype.name == "bf16", repr(half))
        session.commit(half)
        session.release(half)
        half = session.open_file(folder / "h.npy", dtype="bf16")
        collective_assert(comm, half.shape == (5, 4), repr(half))
        expect(comm, um.ParamError, ["path = 7"], lambda: session.create_file(7, (3, 3), "f64"))
        for make in (session.open_file, lambda path: session.create_file(path, (3, 3), "f64")):
            expect(comm, um.ParamError, ["path = ''", "name a file"], functools.partial(make, ""))
        for end in ("none/", "none/."):
            nameless = functools.partial(session.create_file, f"{folder}/{end}", (3, 3), "f64")
            expect(comm, um.DataFileError, [end, "names no file"], nameless)
        collective_assert(comm, not any("none" in name for name in left(comm, folder)), "a file without a name")
        expect(comm, um.ParamError, ["shape"], lambda: session.create_file(folder / "e.npy", (3,), "f64"))


def left(comm, folder):
    """What is in a folder now. Collective."""
    comm.Barrier()
    return comm.bcast(sorted(os.listdir(folder)) if comm.rank == 0 else None)


@pytest.mark.one_node("other nodes need not see the file")
def test_a_file_that_one_rank_cannot_open_is_taken_away_again(comm, open_session, folder, monkeypatch):
    with open_session(comm) as session:
        (folder / str(comm.rank)).mkdir()
        comm.Barrier()
        monkeypatch.chdir(folder / str(comm.rank))
        if comm.size > 1:
            for _ in range(2):
                expect(
                    comm,
                    um.DataFileError,
                    ["c.npy cannot be read"],
                    lambda: session.create_file("c.npy", (9, 9), "f64"),
                )
            collective_assert(comm, left(comm, folder / "0") == [], "a file is left")
        expect(comm, um.DataFileError, ["that no file can have"], lambda: session.create_file("a\0b", (9, 9), "f64"))


FAILED = pytest.param("failed", marks=pytest.mark.one_node("an executor uploads, whose files are its own"))


@pytest.mark.parametrize("end", ["release", "close", "unwritten", FAILED, "block", "mended", "error"])
def test_a_new_file_has_its_name_when_it_is_complete_and_else_nothing_is_left(comm, open_session, folder, end):
    path = folder / "c.npy"
    save(comm, path, np.zeros(1))
    once(comm, lambda: path.chmod(0o600))
    errors = {"error": um.ParamError, "failed": um.DataFileError, "block": um.DataFileError}
    ends = pytest.raises(errors[end]) if end in errors else contextlib.nullcontext()
    with ends, open_session(comm) as session:
        a = ones(session, (9, 9))
        c = session.create_file(path, (9, 9), "f64", overwrite=True)
        again = functools.partial(session.create_file, path, (9, 9), "f64", overwrite=True)
        expect(comm, um.DataFileError, ["c.npy.partial", "is writing it"], again)
        once(comm, lambda: path.rename(folder / "was.npy"))
        expect(comm, um.DataFileError, ["is unfinished, as", "c.npy.partial"], lambda: session.open_file(path))
        once(comm, lambda: (folder / "was.npy").rename(path))
        if end in ("block", "mended"):
            session.gemm(a[:3], a, c[:3])
        elif end != "unwritten":
            session.gemm(a, a, c)
        if end == "failed":
            with pytest.MonkeyPatch.context() as patch:
                if comm.rank == comm.size - 1:
                    patch.setattr(session._backend.files, "copy", broken)
                expect(comm, um.DataFileError, ["planted"], lambda: session.upload(a, c))
        if end in ("block", "mended"):
            little = um.ScheduleOptions(device_memory=64)
            expect(comm, um.CapacityError, [""], lambda: session.gemm(a[3:6], a, c[3:6], options=little))
            session.gemm(a[6:], a, c[6:])
            expect(comm, um.DataFileError, ["rows 3 to 6 and columns 0 to 9 of"], lambda: session.commit(c))
        if end == "mended":
            for part in (slice(2, 4), slice(4, 7)):  # neither of which has all that has failed
                session.gemm(a[part], a, c[part])
        if end == "close":  # what is written stays good where a call is refused
            little = um.ScheduleOptions(grid=(5, 5))
            expect(comm, um.ParamError, ["5"], lambda: session.gemm(a, a, c, options=little))
        if end == "release":
            session.release(c)
        if end == "error":
            session.gemm(a, a, a)
    collective_assert(comm, session._group._freed, "the communicator is kept")
    found, mode = np.load(path), path.stat().st_mode & 0o777
    collective_assert(
        comm, (found.size == 81) == (end in ("release", "close", "mended")) and mode == 0o600, f"{found}, {mode:o}"
    )
    collective_assert(comm, left(comm, folder) == ["c.npy"], "something is left")


PROGRAM = """
import os, sys
from mpi4py import MPI
import uncut_mpi as um

comm, how, path = MPI.COMM_WORLD, *sys.argv[1:3]
session = um.Session(comm, backend="host", machine=um.Machine.uniform(2), ranks_per_node=2)
c = session.create_file(path, (9, 9), "f64", overwrite="overwrite" in sys.argv)
a = session.empty_host((9, 9))
a.array[:] = 1.0
session.barrier()
session.gemm(a, a, c)
if how == "goes on":
    session.close()
elif comm.rank == 1 and how == "killed":
    os.kill(os.getpid(), 9)
elif comm.rank == 1 and how == "error":
    raise ValueError("mine")
elif comm.rank == 1 and how == "exit":
    with session:
        sys.exit(4)
if how != "ends":
    session.barrier()
"""


@pytest.mark.host_backend
def test_what_a_program_leaves_that_does_not_close_its_session_and_how_the_next_goes_on(comm, folder):
    with carried(comm):
        if comm.rank == 0:
            (folder / "program.py").write_text(PROGRAM)

            def run(how, *more):
                return jobs.start(["-m", "mpi4py", folder / "program.py", how, folder / f"{how[:4]}.npy", *more])

            running = [run(how) for how in ("killed", "error", "exit", "ends")]
            said = [jobs.ended(one) for one in running]
            assert [status for status, _, _ in said] == [9, 1, 4, 0], said
            assert sorted(os.listdir(folder)) == ["ends.npy.partial", "kill.npy.partial", "program.py"]
            assert said[3][2].count("was not completed and is left") == 1, said[3]
            (folder / "kill.npy.partial").rename(folder / "goes.npy.partial")
            status, _, errors = jobs.ended(run("goes on"))
            assert "pass overwrite=True" in errors, (status, errors)
            status, _, errors = jobs.ended(run("goes on", "overwrite"))
            assert (np.load(folder / "goes.npy") == 9.0).all(), errors


def broken(*unused):
    raise um.DataFileError("planted")


def test_what_files_are_not_is_said_on_all_ranks(comm, open_session, folder):
    path = save(comm, folder / "a.npy", np.ones((90, 90)))
    save(comm, folder / "v.npy", np.ones(90))
    with open_session(comm) as session:
        for arguments, words in (
            ((str(folder / "none.npy"),), ["none.npy cannot be read"]),
            ((str(folder),), ["cannot be read"]),
            ((str(folder / "v.npy"),), ["1 dimension, a matrix has two"]),
        ):
            expect(comm, um.DataFileError, words, functools.partial(session.open_file, *arguments))
        expect(comm, um.DataFileError, ["holds f64", "f32"], lambda: session.open_file(path, dtype="f32"))
        expect(comm, um.ParamError, ["mode = 'w'", "'r+'"], lambda: session.open_file(path, mode="w"))
        expect(comm, um.ParamError, ["path = 7"], lambda: session.open_file(7))
        a, b = session.open_file(path), session.open_file(path)
        expect(comm, um.ParamError, ["lies in the file", "download"], lambda: a.local)
        mend = "download" if session.machine.num_nodes == 1 else "gather"
        for wanted in (lambda: np.asarray(a), lambda: a.array, lambda: a.T.array):
            expect(comm, um.ParamError, ["lies in the file", mend], wanted)
        collective_assert(comm, "a.npy" in repr(a), repr(a))
        expect(comm, um.ParamError, ["opened to be read", "mode='r+'"], lambda: session.gemm(a, a, b))
        c = session.open_file(path, mode="r+")
        expect(comm, um.ParamError, ["overlap"], lambda: session.gemm(a, b, c))


def test_more_host_memory_than_there_is_and_less_than_is_needed_are_refused_by_number(comm, open_session, folder):
    path = save(comm, folder / "a.npy", np.ones((90, 90)))
    with open_session(comm) as session:
        a, b, c = session.open_file(path), session.open_file(path), session.empty_host((90, 90))
        for room, words in (
            (1 << 60, ["was asked for", "each of"]),
            (100, ["the smallest of them take", "host_memory"]),
        ):
            options = um.ScheduleOptions(host_memory=room)
            expect(comm, um.CapacityError, words, functools.partial(session.gemm, a, b, c, options=options))
        session.gemm(a, b, c)
        collective_assert(comm, shows(c, 90), "the session goes on")
        too_much = functools.partial(session.gemm, c, c, options=um.ScheduleOptions(host_memory=1 << 60))
        expect(comm, um.CapacityError, ["was asked for", "each of"], too_much)  # though nothing is copied
    for value in (0, -1):
        expect(comm, um.ParamError, ["host_memory", "below 1"], lambda v=value: open_session(comm, host_memory=v))


def test_host_memory_that_earlier_plans_have_taken_is_there_for_the_next(comm, open_session, folder, monkeypatch):
    a, b, _ = matrices(11, 90, 90, 90)
    paths = [save(comm, folder / f"{name}.npy", one) for name, one in (("a", a), ("b", b))]
    with open_session(comm, host_memory=3 << 20) as session:
        taken = session._calls.binder.host_softbuf.sizes
        there = comm.size * (4 << 20)  # what the first one takes is more than a quarter
        monkeypatch.setattr(plan_maker, "available_bytes", lambda: (there - int(taken.sum()), "a test"))
        files, c = [session.open_file(path) for path in paths], session.empty_host((90, 90))
        for trans_a in ("N", "T"):
            session.gemm(*files, c, trans_a=trans_a)
            wanted = (a if trans_a == "N" else a.T) @ b
            good = taken.sum() > there // 4 and shows(c, wanted, functools.partial(close, k=90))
            collective_assert(comm, bool(good), f"{trans_a}: {taken}")


@pytest.mark.parametrize("how", ["shorter", "unwriteable", "full"])
def test_a_file_that_fails_in_a_call_ends_it_on_all_ranks_and_the_session_goes_on(comm, open_session, folder, how):
    a, b, _ = matrices(5, 300, 280, 310)
    paths = [save(comm, folder / f"{name}.npy", array) for name, array in zip("abc", (a, b, a @ b), strict=True)]
    with open_session(comm, host_memory=ROOM) as session:
        files = [session.open_file(path, mode="r+") for path in paths]
        session.gemm(*files)
        length = os.path.getsize(paths[0])
        comm.Barrier()
        if how == "shorter" and comm.rank == 0:
            os.truncate(paths[0], length // 2)
        if how == "unwriteable" and comm.rank == comm.size - 1:
            (of_c,) = (window for window in session._backend.files._windows if window.path.endswith("c.npy"))
            with open(paths[2], "rb") as readable:
                os.dup2(readable.fileno(), of_c.descriptor)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if how == "full" and comm.rank == comm.size - 1:  # as a disk or a quota that ends: writes fail from there on
            resource.setrlimit(resource.RLIMIT_FSIZE, (length // 2, limits[1]))
        comm.Barrier()
        words = {
            "shorter": ["a.npy changed while it was in use"],
            "unwriteable": ["c.npy cannot be"],
            "full": ["c.npy cannot be", "File too large"],
        }[how]
        began = time.monotonic()
        expect(comm, um.DataFileError, words, lambda: session.gemm(*files, beta=0.0))
        collective_assert(comm, time.monotonic() - began < MOST_S, "nobody waits for those that have failed")
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        if how == "shorter" and comm.rank == 0:
            with open(paths[0], "r+b") as file:
                np.save(file, a)
        comm.Barrier()
        target = session.empty_host((300, 280))
        session.gemm(*files[:2], target)
        collective_assert(comm, shows(target, a @ b, functools.partial(close, k=310)), "the session goes on")


def resident_bytes():
    """Return what this process has of memory that is no file's."""
    with open("/proc/self/status", encoding="ascii") as status:
        fields = dict(line.split(":", 1) for line in status)
    return 1024 * sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem"))


@pytest.mark.host_backend
def test_files_of_four_times_the_memory_stay_within_twice_what_is_allowed(comm, open_session, folder):
    extent, room, of_device = 2500, 12_000_000, 24_000_000
    pool = np.random.default_rng(8).standard_normal((extent, 100))
    paths = [save(comm, folder / f"{name}.npy", np.asfortranarray(np.tile(pool, 25))) for name in "abc"]
    most, over = [0], threading.Event()

    def look():
        while not over.wait(0.002):
            most[0] = max(most[0], resident_bytes())

    with open_session(comm, host_memory=room, device_memory=of_device) as session:
        files = [session.open_file(path, mode="r+") for path in paths]
        before = resident_bytes()
        thread = threading.Thread(target=look)
        thread.start()
        session.gemm(*files)
        over.set()
        thread.join()
        assert os.path.getsize(paths[0]) > 4 * room
        grown = most[0] - before
        # Of the host backend devices are memory of the host, and each rank maps that of the others.
        collective_assert(comm, 0 < grown < 2 * comm.size * (room + of_device), f"{grown / 2**20:.0f} MiB")
        x = np.random.default_rng(9).standard_normal(extent)
        block = np.tile(pool, 25)
        wanted, found = block @ (block @ x), np.load(paths[2], mmap_mode="r") @ x
        collective_assert(comm, np.abs(found - wanted).max() < 1e-10 * np.abs(wanted).max(), "the product")


@pytest.mark.parametrize("extents", [(8, 8), (100, 61)])
def test_files_are_copied_into_other_orders_layouts_and_files(comm, open_session, folder, extents):
    values = np.random.default_rng(3).standard_normal(extents)
    with open_session(comm, host_memory=ROOM, verify=True) as session:
        for number, (order, other) in enumerate(itertools.product("FC", repeat=2)):
            source = session.open_file(save(comm, folder / f"s{number}.npy", np.array(values, order=order)))
            path = save(comm, folder / f"t{number}.npy", np.zeros(extents, order=other))
            session.redistribute(source, None, out=session.open_file(path, mode="r+"))
            collective_assert(comm, np.array_equal(np.load(path), values), f"file {order} to file {other}")
            for layout, memory in itertools.product((um.Layout.rows(), um.Layout.cols()), memories(comm.size)):
                target = session.empty(extents, "f64", layout, order=other, memory=memory)
                session.redistribute(source, None, out=target)
                right = shows(session.download(target), values)
                collective_assert(comm, right, f"{order} to {layout} {other} {memory}")


@pytest.mark.parametrize("orders", [*itertools.product("FC", repeat=3)], ids="".join)
def test_complex_files_of_any_orders_are_conjugated(comm, open_session, folder, orders):
    m, n, k = 70, 64, 90
    rng = np.random.default_rng(6)
    a, b = (rng.standard_normal(shape) + 1j * rng.standard_normal(shape) for shape in ((k, m), (n, k)))
    paths = [
        save(comm, folder / f"{name}.npy", np.array(one, order=order))
        for name, one, order in zip("abc", (a, b, np.zeros((m, n), complex)), orders, strict=True)
    ]
    with open_session(comm, host_memory=ROOM // 3, verify=True) as session:
        files = [session.open_file(path, mode="r+") for path in paths]
        session.gemm(*files, trans_a="C", trans_b="C")
        wanted = a.conj().T @ b.conj().T
        collective_assert(comm, np.abs(np.load(paths[2]) - wanted).max() < 1e-11, "op C")
        session.gemm(files[0].H, files[1].H, files[2])
        collective_assert(comm, np.abs(np.load(paths[2]) - wanted).max() < 1e-11, "views H")


@pytest.mark.mpi(min_size=2)
@pytest.mark.one_node("other nodes need not see the files")
def test_ranks_that_see_other_files_are_told(comm, open_session, folder, monkeypatch):
    (folder / str(comm.rank)).mkdir(exist_ok=True)
    np.save(folder / str(comm.rank) / "x.npy", np.full((60, 60), float(comm.rank)))
    save(comm, folder / "0" / "y.npy", np.ones((60, 60)))
    monkeypatch.chdir(folder / str(comm.rank))
    with open_session(comm) as session:
        before = len(os.listdir("/proc/self/fd"))
        expect(comm, um.DataFileError, ["x.npy is not the same file"], lambda: session.open_file("x.npy"))
        expect(comm, um.DataFileError, ["y.npy cannot be read"], lambda: session.open_file("y.npy"))
        collective_assert(comm, before == len(os.listdir("/proc/self/fd")), "descriptors")


def test_a_result_file_that_became_shorter_is_told_before_anything_is_written(comm, open_session, folder):
    paths = [save(comm, folder / f"{name}.npy", np.ones((60, 60))) for name in "abc"]
    with open_session(comm) as session:
        files = [session.open_file(path, mode="r+") for path in paths]
        session.gemm(*files)
        once(comm, lambda: os.truncate(paths[2], 0))
        expect(comm, um.DataFileError, ["c.npy changed while it was in use"], lambda: session.gemm(*files))
        collective_assert(comm, os.path.getsize(paths[2]) == 0, "nothing is written")


def test_a_long_k_that_does_not_fit_at_once_is_planned_otherwise(comm, open_session, folder):
    a, b = np.random.default_rng(1).standard_normal((2, 40, 20000))
    paths = [save(comm, folder / "a.npy", a), save(comm, folder / "b.npy", np.ascontiguousarray(b.T))]
    with open_session(comm, device_memory=500_000, host_memory=1_000_000) as session:
        c = session.empty_host((40, 40))
        session.gemm(*(session.open_file(path) for path in paths), c)
        collective_assert(comm, shows(c, a @ b.T, np.allclose, rtol=0, atol=1e-9), "the product")


def test_another_file_beside_a_cyclic_matrix_needs_no_other_plan(comm, session, folder):
    left, right, _ = matrices(5, 64, 64, 64)
    for name, one in (("a.npy", left), ("other.npy", 2 * left)):
        save(comm, folder / name, one)
    a, other = (session.open_file(folder / name) for name in ("a.npy", "other.npy"))
    layout = um.Layout.block_cyclic(8, 8, grid=(comm.size, 1))
    b, c = (made_of(session, one, layout, memory="host") for one in (right, np.zeros((64, 64))))
    with session.plan(a, b, c, reads_c=False) as plan:
        before = plan.schedule
        plan.execute(a=other)
        good = close(c.local, part_of(c, 2 * (left @ right)), 64)
        collective_assert(comm, good and plan.schedule is before, f"{c.local}, {plan.schedule is before}")
