"""Ranks of several nodes, which share nothing: products and copies of whatever lies where, and what goes wrong."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import os
import random
import time

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers.collective import allgather, collective_assert, once, outcome
from tests.helpers.products import ones
from uncut_mpi.api.lifetime import RANKS_PER_NODE
from uncut_mpi.command import job
from uncut_mpi.command.arguments import parse
from uncut_mpi.device.host.executor import HostRun
from uncut_mpi.errors import DeviceError
from uncut_mpi.model.ports import Net
from uncut_mpi.planning.schedule import Kind
from uncut_mpi.segments import Segment

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.host_backend]


@pytest.fixture(autouse=True)
def as_it_is_said(monkeypatch):
    """Have nothing but what a session is told make nodes."""
    monkeypatch.delenv(RANKS_PER_NODE, raising=False)


def machine_of(size, each):
    """Return a machine of nodes with so many ranks, the last with what is left."""
    node_of = [rank // each for rank in range(size)]
    nodes = [um.Machine.uniform(node_of.count(node)) for node in range(node_of[-1] + 1)]
    return um.Machine.joined(nodes, node_of, Net(10.0, 5e-6))


@pytest.fixture
def open_nodes(comm, per_node):
    machine = machine_of(comm.size, per_node)
    return functools.partial(um.Session, comm, backend="host", machine=machine, ranks_per_node=per_node, timeout_s=20)


def random_layout(rng, size):
    ranks = rng.sample(range(size), size)
    grids = [(rows, size // rows) for rows in range(1, size + 1) if size % rows == 0]
    rows, cols = rng.choice(grids)
    return rng.choice(
        (
            um.Layout.whole(rng.randrange(size)),
            um.Layout.rows(ranks=ranks),
            um.Layout.cols(),
            um.Layout.replicated(),
            um.Layout.block_cyclic(rng.randint(1, 9), rng.randint(1, 9), grid=(rows, cols)),
        )
    )


@pytest.mark.parametrize("seed", range(12))
def test_products_of_whatever_lies_on_whichever_node_are_right(comm, open_nodes, seed):
    rng = random.Random(seed)
    m, n, k = (rng.randint(1, 60) for _ in range(3))
    values = np.random.default_rng(seed)
    a, b, c = (values.uniform(-1, 1, shape) for shape in ((m, k), (k, n), (m, n)))
    alpha, beta = rng.choice((1.0, 1.2345)), rng.choice((0.0, 1.1154))
    with open_nodes() as session:

        def dealt(array):
            memory = rng.choice(("device", "host"))
            root = rng.randrange(session.size)
            return session.scatter(
                array if session.rank == root else None, random_layout(rng, comm.size), root, memory=memory
            )

        x, y, z = (dealt(one) for one in (a, b, c))
        options = um.ScheduleOptions(scheduler=rng.choice(("uncut", "kblocks", "auto")))
        for _ in range(2):
            session.gemm(x, y, z, alpha=alpha, beta=beta, options=options)
        root = rng.randrange(session.size)
        found = session.gather(z, root)
    wanted = c
    for _ in range(2):
        wanted = alpha * (a @ b) + beta * wanted
    # k + 4 roundings of each of two products (Higham, section 3.5), and the second's of the first.
    bound = 3 * (k + 4) * np.finfo(np.float64).eps * (abs(alpha) * (1 + beta) * (np.abs(a) @ np.abs(b)) + np.abs(c))
    collective_assert(comm, comm.rank != root or (np.abs(found - wanted) <= bound).all(), f"seed {seed}")


def test_products_by_the_rule_of_parsecs_paper_are_right(comm, open_nodes, per_node):
    options = um.ScheduleOptions("parsec", tile=4, device_memory=6000)  # for blocks of C, and few k-blocks
    a, b, c = np.random.default_rng(5).uniform(-1, 1, (3, 40, 40))
    with open_nodes() as session:
        layout = um.Layout.block_cyclic(4, 4, grid=(1, comm.size))
        x, y, z = (session.scatter(one if comm.rank == 0 else None, layout, memory="host") for one in (a, b, c))
        said = outcome(lambda: session.gemm(x, y, z, beta=1.0, options=options))
        found = session.gather(z)
    if comm.size % per_node:
        collective_assert(comm, "as many devices on each node" in said, said)
    else:
        right = comm.rank > 0 or np.allclose(found, a @ b + c, rtol=0, atol=44 * 40 * np.finfo(np.float64).eps)
        collective_assert(comm, right, said)


def test_host_memory_of_all_ranks_is_that_of_the_first_node(comm, open_nodes, per_node):
    with open_nodes() as session:
        a, c = ones(session), session.empty_host((4, 4))
        session.gemm(a, a, c)
        here = comm.rank < per_node
        right = bool((c.array == 4.0).all()) if here else outcome(lambda: c.array).startswith("ParamError")
        if not here:
            said = outcome(lambda: c.array)
            right &= "the first node" in said and "session.gather(" in said
        dealt = outcome(lambda: session.empty((4, 4), "f64", um.Layout.rows(), memory="shared"))
        parts = session.empty((4, 4), "f64", um.Layout.rows())
        session.upload(c, parts)
        copied = bool((parts.local == 4.0).all())
        parts.local[...] = comm.rank
        back = session.download(parts)
        rows = [rank for rank, (down, _) in enumerate(parts.layout.rectangles((4, 4), comm.size)) for _ in range(*down)]
        copied &= not here or back.array[:, 0].tolist() == rows
        # Each rank's own memory, where nothing else is said of what would be dealt in it.
        rows_of = session.gemm(c, a, out_layout=um.Layout.rows())
        elsewhere = [rows_of, session.redistribute(c, um.Layout.whole(comm.size - 1))]
        apart = all(one.memory == "host" for one in elsewhere) and bool((rows_of.local == 16.0).all())
    collective_assert(comm, right and copied and apart, f"the array {right}, copies {copied}, {elsewhere}")
    collective_assert(comm, "ParamError" in dealt and "memory='host'" in dealt, dealt)


def test_ranks_of_different_nodes_share_no_memory(comm, open_nodes, per_node, monkeypatch):
    opened, made = [], []
    true_open, true_create = Segment.open, Segment.create
    monkeypatch.setattr(Segment, "open", lambda handle: opened.append(handle) or true_open(handle))

    def create(*about, **more):
        made.append(true_create(*about, **more))
        return made[-1]

    monkeypatch.setattr(Segment, "create", create)
    with open_nodes() as session:
        a = session.empty((40, 40), "f64", um.Layout.rows())
        a.local[...] = 1.0
        c = session.empty((40, 40), "f64", um.Layout.cols())
        session.gemm(a, a, c)
        right = bool((c.local == 40.0).all())
    of_nodes = allgather(comm, [one.handle for one in made])
    others = {
        handle
        for rank, handles in enumerate(of_nodes)
        if rank // per_node != comm.rank // per_node
        for handle in handles
    }
    collective_assert(comm, right and not others & {*opened}, f"{len(opened)} opened")


def test_what_comes_of_a_matrix_of_the_first_node_lies_with_each_rank_where_nobody_says_else(comm, open_nodes):
    with open_nodes() as session:
        a = ones(session)
        c = session.gemm(a, a, out_layout=um.Layout.rows())
        fastest = session.gemm(a, a, out_layout="auto")
        moved = session.redistribute(a, um.Layout.cols())
        at_last = session.redistribute(a, um.Layout.whole(comm.size - 1))
        right = bool((c.local == 4.0).all() and (fastest.local == 4.0).all() and (moved.local == 1.0).all())
        right &= comm.rank != comm.size - 1 or bool((at_last.local == 1.0).all())
        refused = outcome(lambda: session.redistribute(a, um.Layout.cols(), memory="shared"))
    collective_assert(comm, right and (c.memory, moved.memory) == ("host", "host"), f"{c!r}, {moved!r}")
    collective_assert(comm, "memory='host'" in refused, refused)


def objects_of_the_system():
    """Return what this process may share with others: open files, sockets and shared mappings, by device and number."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the list itself is closed
            about = os.stat(f"/proc/self/fd/{number}")
            found.add((about.st_dev, about.st_ino))
    with open("/proc/self/maps") as lines:
        for line in lines:
            _, access, _, device, number, *_ = line.split()
            if access.endswith("s"):
                major, minor = (int(part, 16) for part in device.split(":"))
                found.add((os.makedev(major, minor), int(number)))
    return found


@pytest.mark.parametrize("apart", [True, False])
def test_ranks_of_different_nodes_have_no_object_of_the_system_in_common(comm, apart):
    with um.Session(comm, backend="host", machine=machine_of(comm.size, 1), ranks_per_node=1) as session:
        session.gemm(*(session.empty((8, 8), "f64", um.Layout.rows()) for _ in "ab"))  # what MPI opens once
    before = objects_of_the_system()
    each = 1 if apart else comm.size
    with um.Session(comm, backend="host", machine=machine_of(comm.size, each), ranks_per_node=each) as session:
        a, b = (session.empty((40, 40), "f64", um.Layout.rows(), memory=memory) for memory in ("device", "host"))
        a.local[...] = b.local[...] = 1.0
        session.gemm(a, b)
        session.upload(session.empty_host((40, 40)), a)
        own = objects_of_the_system() - before
        every = allgather(comm, own)
    common = {one for other, its in enumerate(every) if other != comm.rank for one in its & own}
    collective_assert(comm, own and bool(common) is not apart, f"{len(own)} objects, in common {common}")


def test_what_goes_between_nodes_is_sent_and_received(comm, open_nodes, per_node):
    with open_nodes(verify=True) as session:
        a, b, c = (
            session.empty((32, 32), "f64", layout) for layout in (um.Layout.rows(), um.Layout.cols(), um.Layout.rows())
        )
        with session.plan(a, b, c) as plan:
            kinds = plan.schedule.tasks["kind"]
            result = plan.execute()
            done = sum(allgather(comm, result.tasks))
    sends = int((kinds == Kind.SEND).sum())
    collective_assert(comm, sends > 0 and done == len(kinds), f"{sends} messages, {done} of {len(kinds)} tasks")


def test_an_error_of_a_task_reaches_all_nodes_and_the_next_product_is_right(comm, open_nodes, monkeypatch):
    step, failures = HostRun._step, ["made up"]

    def broken(*about):
        if failures:
            raise DeviceError(failures.pop())
        step(*about)

    with open_nodes() as session:
        a, c = (session.empty((24, 24), "f64", um.Layout.rows()) for _ in range(2))
        a.local[...] = 1.0
        with monkeypatch.context() as patch:
            if comm.rank == comm.size - 1:
                patch.setattr(HostRun, "_step", broken)
            said = outcome(lambda: session.gemm(a, a, c))
        session.gemm(a, a, c)
        right = bool((c.local == 24.0).all())
    collective_assert(comm, "DeviceError" in said and "made up" in said and right, f"{said}, {right}")


def test_a_rank_that_waits_hears_that_another_node_gets_on(comm, open_nodes, monkeypatch):
    step, busy = HostRun._step, comm.rank == 0
    slow = []

    def later(run, lane, index):
        if busy and len(slow) < 8:
            slow.append(time.sleep(0.2))  # each in time, all together not
        step(run, lane, index)

    with open_nodes(timeout_s=1.0) as session:
        last = um.Layout.whole(comm.size - 1)
        a, c = (session.empty((24, 24), "f64", layout) for layout in (um.Layout.rows(), last))
        a.local[...] = 1.0
        options = um.ScheduleOptions("kblocks", devices=(0,), blocking=um.Blocking(first=2, block=2))
        with session.plan(a, a, c, options=options) as plan, monkeypatch.context() as patch:
            patch.setattr(HostRun, "_step", later)
            said = outcome(plan.execute)
        right = comm.rank != comm.size - 1 or bool((c.array == 24.0).all())
    collective_assert(comm, right and (len(slow) == 8) == busy, f"{said}, {len(slow)}")


def test_ranks_that_call_differently_are_told(comm, open_nodes):
    odd = comm.rank == comm.size - 1
    with open_nodes() as session:
        a, c = ones(session), session.empty_host((4, 4))
        calls = outcome(session.barrier if odd else lambda: session.gemm(a, a, c))
        scalars = outcome(lambda: session.gemm(a, a, c, alpha=2.0 if odd else 1.0))
        session.gemm(a, a, c)
    collective_assert(comm, "RankMismatchError" in calls and "called barrier" in calls, calls)
    collective_assert(comm, "RankMismatchError" in scalars and "alpha" in scalars, scalars)


def test_a_rank_that_fails_alone_is_named_on_all_nodes(comm, open_nodes):
    odd = comm.rank == comm.size - 1
    session = open_nodes(arrival_timeout_s=10.0)

    def program():
        with session:
            if odd:
                raise ValueError("the program's own")
            session.barrier()

    said = outcome(program)
    wanted = "ValueError" if odd else f"rank {comm.size - 1} left the session by ValueError"
    collective_assert(comm, wanted in said, said)


@pytest.mark.parametrize("heard", ["waited", "dropped"])
def test_a_product_that_is_not_waited_for_is_done_when_its_call_returns(comm, open_nodes, monkeypatch, heard):
    step, failures = HostRun._step, []

    def broken(*about):
        if failures:
            raise DeviceError(failures.pop())
        step(*about)

    monkeypatch.setattr(HostRun, "_step", broken)
    with open_nodes() as session:
        a, c, e = (session.empty((24, 24), "f64", um.Layout.rows()) for _ in range(3))
        a.local[...] = 1.0
        first = session.gemm(a, a, c, wait=False)
        second = session.gemm(a, c, e, wait=False)
        good = first.done() and second.done() and second.wait() is e and bool((e.local == 576.0).all())
        failures[:] = ["made up"] * (comm.rank == comm.size - 1)
        handle = session.gemm(a, a, c, wait=False)
        if heard == "waited":
            said = outcome(handle.wait)
        else:
            del handle
            gc.collect()
            said = outcome(session.barrier)
        session.gemm(a, a, c)
        good = good and bool((c.local == 24.0).all())
    collective_assert(comm, good and "DeviceError" in said and "made up" in said, f"{good}, {said}")


@pytest.mark.parametrize("place", ["h,h,h", "rows,cols@host,rows", "0,h,1"])
def test_the_command_computes_and_checks_over_nodes(comm, per_node, place):
    words = ["-m", "90", "-n", "80", "-k", "70", "--place", place, "--beta", "0.5", "--repeat", "2"]
    words += ["--backend", "host", "--ranks-per-node", str(per_node)]
    lines = []
    passed = job.run(comm, parse(words), words, lines.append)
    said = "\n".join(map(str, lines))
    collective_assert(comm, passed and (comm.rank > 0 or "all 7200 elements" in said), said)


def test_a_machine_on_other_nodes_is_refused(comm, per_node):
    machine = um.Machine.cluster(um.Machine.uniform(1), comm.size, Net(10.0, 5e-6))
    wrong = machine if per_node > 1 else um.Machine.cluster(um.Machine.uniform(comm.size), 1, Net(10.0, 5e-6))
    said = outcome(lambda: um.Session(comm, backend="host", machine=wrong, ranks_per_node=per_node))
    collective_assert(comm, "TopologyError" in said and "Machine.cluster" in said, said)


@pytest.mark.parametrize("given", [0, -1, 1.5, "two"])
def test_no_number_folder_is_refused(comm, given):
    said = outcome(lambda: um.Session(comm, backend="host", ranks_per_node=given))
    collective_assert(comm, "ParamError" in said and "ranks_per_node" in said, said)


def test_the_environment_names_ranks_per_node_where_a_session_does_not(comm, monkeypatch, per_node):
    monkeypatch.setenv(RANKS_PER_NODE, str(per_node))
    with um.Session(comm, backend="host") as session:
        nodes, ends = session.machine.num_nodes, len(session.machine.latency_s)
        net = session.machine.bandwidth_gb_per_s[0, comm.size - 1]
    collective_assert(comm, nodes == -(-comm.size // per_node) and ends == comm.size + nodes, f"{nodes} nodes")
    collective_assert(comm, 0 < net < math.inf, net)
    monkeypatch.setenv(RANKS_PER_NODE, "few")
    said = outcome(lambda: um.Session(comm, backend="host"))
    collective_assert(comm, "ParamError" in said and RANKS_PER_NODE in said, said)


@pytest.fixture
def folder(comm, per_node, mpi_tmp_path, monkeypatch):
    """A folder that all nodes see; each node is in one of its own there, where names of files are its own."""
    comm.Barrier()
    own = mpi_tmp_path / f"node{comm.rank // per_node}"
    own.mkdir(exist_ok=True)
    monkeypatch.chdir(own)
    comm.Barrier()
    return mpi_tmp_path


def values_of(*shape):
    return np.random.default_rng(5).uniform(-1, 1, shape)


@pytest.mark.parametrize("room", [None, 60_000])
def test_files_that_all_nodes_see_are_read_and_written_by_the_ranks_of_each(comm, open_nodes, folder, per_node, room):
    a, b = values_of(120, 90), values_of(90, 110)
    paths = [str(folder / f"{name}.npy") for name in "abcd"]
    once(comm, lambda: (np.save(paths[0], a), np.save(paths[1], np.asfortranarray(b))))
    with open_nodes(verify=True, host_memory=room) as session:
        x, y = (session.open_file(path) for path in paths[:2])
        z = session.create_file(paths[2], (120, 110), "f64")
        session.gemm(x, y, z)
        session.commit(z)
        right = np.abs(np.load(paths[2]) - a @ b).max() < 1e-12
        back = session.download(x)
        right &= comm.rank >= per_node or np.array_equal(back.array, a)
        copy = session.create_file(paths[3], (120, 90), "f64", order="C")
        session.upload(back, copy)
        session.commit(copy)
        right &= np.array_equal(np.load(paths[3]), a)
        dealt = session.redistribute(x, um.Layout.block_cyclic(7, 5, grid=(1, comm.size)), memory="device")
        found = session.gather(dealt, comm.size - 1)
        right &= comm.rank != comm.size - 1 or np.array_equal(found, a)
        holders = x.layout.holders(comm.size)
    collective_assert(comm, right and [*holders] == [*range(comm.size)], f"{holders}")


def test_a_file_that_only_the_first_node_sees_is_read_and_written_there(comm, open_nodes, folder, per_node):
    a, b = values_of(60, 50), values_of(50, 70)
    once(comm, lambda: np.save("a.npy", a))
    with open_nodes(verify=True) as session:
        x = session.open_file("a.npy")
        y = session.scatter(b if comm.rank == 0 else None, um.Layout.rows())
        z = session.create_file("c.npy", (60, 70), "f64")
        session.gemm(x, y, z)
        session.commit(z)
        holders = [[*one.layout.holders(comm.size)] for one in (x, z)]
    right = np.abs(np.load(folder / "node0" / "c.npy") - a @ b).max() < 1e-12
    collective_assert(comm, right and holders == [[*range(per_node)]] * 2, f"{holders}")


def test_each_node_reads_its_own_copy_of_a_file(comm, open_nodes, folder, per_node):
    node = comm.rank // per_node

    if comm.rank % per_node == 0:
        values = np.full((8 * comm.size, 3000), float(node))  # so that it shows whose was read
        values[:3] = values[-3:] = -1.0  # copies begin and end alike
        np.save("x.npy", values)
        os.utime("x.npy", ns=(10**18 + 7, 10**18 + 7))
    comm.Barrier()
    with open_nodes() as session:
        x = session.open_file("x.npy")
        found = session.gather(x)
        session.release(x)
        said = outcome(lambda: session.open_file("x.npy", mode="r+"))
    wanted = np.repeat([rank // per_node for rank in range(comm.size)], 8)
    collective_assert(comm, comm.rank > 0 or np.array_equal(found[3:-3, 0], wanted[3:-3]), found)
    collective_assert(comm, "DataFileError" in said and "not the same file on all ranks" in said, said)


def test_a_file_that_another_node_has_otherwise_is_one_error_on_every_rank(comm, open_nodes, folder, per_node):
    if comm.rank % per_node == 0:
        np.save("x.npy", np.full((60, 60), float(comm.rank)))
        os.utime("x.npy", ns=(10**18, 10**18))  # as if written at the same moment
    comm.Barrier()
    with open_nodes() as session:
        said = outcome(lambda: session.open_file("x.npy"))
        missing = outcome(lambda: session.open_file("nothing.npy"))
        session.barrier()
    every = allgather(comm, said)
    good = every == [every[0]] * comm.size and "DataFileError" in said and "not the same file on all ranks" in said
    collective_assert(comm, good and "cannot be read" in missing, f"{said} {missing}")
