"""The host backend with its ranks as threads of one process: no MPI, real shared memory, real flags."""

from __future__ import annotations

import functools
import gc
import random
import re
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
import threadpoolctl

from tests.helpers.by_hand import ByHand
from tests.helpers.faults import set_rows
from tests.helpers.faulty import Disorder, FaultyBackend
from tests.helpers.host_copies import contents, copied, random_copies
from tests.helpers.numbers import factors_of, of_both_parts, random_values, wide_of
from tests.helpers.pushed import Pushed
from tests.helpers.transposed import bits_of, filled, transposing_copies
from uncut_mpi.api.watchdog import explain
from uncut_mpi.device.host import HostBackend, bodies
from uncut_mpi.device.host.backend import timeable
from uncut_mpi.device.host.executor import _Patience
from uncut_mpi.device.host.system import BlasThreads
from uncut_mpi.device.interface import ExecutionReport, FlagTable, Pin, ProgressBoard
from uncut_mpi.device.views import bytes_at, matrix_at
from uncut_mpi.errors import DeviceError, ParamError, ScheduleError, StallError
from uncut_mpi.model.dtypes import MEASURED, DType
from uncut_mpi.planning.builder import RegionRef
from uncut_mpi.planning.lower import Code, lower
from uncut_mpi.planning.schedule import MAX_LANES, Factor, Kind, Op, Schedule, buffer_bytes

F, N, T = Factor, Op.N, Op.T


class Cluster:
    """Ranks as threads, each with a backend and buffers of its own; peers' memory is opened by handle."""

    def __init__(
        self,
        schedule: Schedule,
        *,
        disorder: Disorder | None = None,
        faults: Mapping[int, Callable[[int, Code, np.ndarray], None]] | None = None,
        epoch: int = 1,
    ) -> None:
        self.schedule, self.epoch = schedule, epoch
        count = schedule.num_ranks
        lowering = lower(schedule)
        self.backends = [FaultyBackend(r, count, disorder=disorder, fault=(faults or {}).get(r)) for r in range(count)]
        self.board = np.zeros(ProgressBoard.shape(count), np.uint32)
        of_host = np.full((count, MAX_LANES), epoch, np.uint32)
        sizes = buffer_bytes(schedule.buffers)
        self._owned = []
        for owner, nbytes in zip(np.maximum(schedule.owners(), 0).tolist(), sizes, strict=True):
            self._owned.append((owner, self.backends[owner].allocate(int(nbytes))))
        flags = [self.backends[r].allocate(4 * int(lowering.num_flags[r])) for r in range(count)]
        for r in range(count):
            self.backends[r].fill_words(flags[r].address, int(lowering.num_flags[r]), epoch)
        self.executables = []
        for r, backend in enumerate(self.backends):
            addresses = [a.address if owner == r else backend.open(a.handle) for owner, a in self._owned]
            peers = [flags[q].address if q == r else backend.open(flags[q].handle) for q in range(count)]
            table = FlagTable(flags[r].address, np.array(peers), of_host)
            self.executables.append(
                backend.executable(lowering.rank_list(r), np.array(addresses), table, ProgressBoard(self.board, r))
            )
        for one in self.executables:
            one.explain = functools.partial(explain, schedule, range(count), True)

    def buffer(self, index: int) -> np.ndarray:
        """The column-major contents of a buffer, as its owner sees them."""
        record = self.schedule.buffers[index]
        dtype = DType(int(record["dtype"])).numpy
        address = self._owned[index][1].address
        return matrix_at(address, int(record["rows"]), int(record["cols"]), int(record["ld"]), dtype)

    def load(self, case: Pushed, seed: int = 0) -> None:
        """Give A, B and C their values and everything else NaN."""
        case.fill(self.schedule, {index: self.buffer(index) for index in range(len(self.schedule.buffers))}, seed)

    def run(self, alpha: float = 1.0, beta: float = 0.0, timeout_s: float = 20.0) -> list[ExecutionReport]:
        """Run every rank's list in a thread of its own, then advance the epoch."""
        reports: dict[int, ExecutionReport] = {}

        def work(rank: int) -> None:
            reports[rank] = self.executables[rank].run(alpha=alpha, beta=beta, epoch=self.epoch, timeout_s=timeout_s)

        threads = [threading.Thread(target=work, args=(r,)) for r in range(len(self.executables))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
        assert len(reports) == len(threads), "a rank did not come back"
        self.epoch = (self.epoch + self.executables[0].span) % 2**32
        return [reports[r] for r in range(len(threads))]

    def close(self) -> None:
        for executable in self.executables:
            executable.close()
        for backend in self.backends:
            backend.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()


def succeed(reports: Sequence[ExecutionReport]) -> None:
    for rank, report in enumerate(reports):
        assert report.error is None, f"rank {rank}: {report.error!r}"


def run_and_judge(case: Pushed, cluster: Cluster, alpha: float, beta: float, seed: int = 0) -> bool:
    cluster.load(case, seed)
    succeed(cluster.run(alpha, beta))
    return case.is_right(cluster.schedule, cluster.buffer(2), alpha, beta, seed)


# -- lanes of the host ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_lanes_of_the_host_among_others_in_any_order_copy_what_the_global_order_says(seed):
    rng = random.Random(seed)
    schedule = random_copies(rng, rng.randint(1, 3), 60)
    disorder = Disorder(seed) if seed else None
    with Cluster(schedule, disorder=disorder, epoch=2**32 - 3) as cluster:  # which the calls take beyond 2³²
        for call in range(3):
            before = contents(schedule, call)
            for index, values in enumerate(before):
                cluster.buffer(index)[...] = values
            reports = cluster.run()
            succeed(reports)
            assert sum(report.tasks for report in reports) == 60
            for index, values in enumerate(copied(schedule, before)):
                assert np.array_equal(cluster.buffer(index), values), f"call {call}, buffer {index}"


@pytest.mark.parametrize("seed", range(4))
def test_a_failure_ends_the_lanes_of_the_host_of_all_ranks(seed):
    schedule = random_copies(random.Random(seed), 3, 60)
    failing = int(np.flatnonzero(schedule.tasks["rank"] == 1)[5])

    def fault(task, code, array):
        if fails and task == failing:
            raise ValueError("planted")

    fails = [True]
    with Cluster(schedule, disorder=Disorder(seed), faults={1: fault}) as cluster:
        reports = cluster.run()
        assert isinstance(reports[1].error, ValueError)
        assert [report.error for report in reports if report is not reports[1]] == [None, None]
        fails.clear()
        for index, values in enumerate(contents(schedule, 7)):
            cluster.buffer(index)[...] = values
        succeed(cluster.run())
        for index, values in enumerate(copied(schedule, contents(schedule, 7))):
            assert np.array_equal(cluster.buffer(index), values)


def test_a_stall_says_which_lane_of_which_rank_is_awaited():
    build = ByHand(2)
    build.task(Kind.JOIN, build.compute_lane(1))
    last = build.task(Kind.JOIN, build.host_lane(1))
    build.task(Kind.JOIN, build.compute_lane(0, 3), awaits=[last])
    with Cluster(build.done()) as cluster:
        error = cluster.executables[0].run(alpha=1.0, beta=0.0, epoch=1, timeout_s=0.05).error
    wanted = "rank 0 has not got on: compute lane 3: task 2, JOIN, waits for task 1 of rank 1, JOIN"
    assert wanted in str(error)


# -- products ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", MEASURED, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("trans", ["NN", "NT", "TN", "TT", "CN", "TC"])
def test_a_product_over_three_ranks_is_right(dtype, trans):
    case = Pushed(dtype=dtype, trans_a=trans[0], trans_b=trans[1])
    with Cluster(case.build()) as cluster:
        assert run_and_judge(case, cluster, *factors_of(dtype))


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 9, 7), (9, 1, 7), (8, 3, 1), (5, 3, 2)])
def test_edges_and_fewer_columns_or_steps_than_parts_are_right(shape):
    case = Pushed(*shape, ranks=4, chunks=3)
    with Cluster(case.build()) as cluster:
        assert run_and_judge(case, cluster, -0.7, 2.5)


@pytest.mark.parametrize("seed", range(40))
def test_any_ready_task_order_and_late_flags_give_the_same_answer(seed):
    case = Pushed(ranks=2 + seed % 3, trans_a="NT"[seed % 2])
    with Cluster(case.build(), disorder=Disorder(seed)) as cluster:
        assert run_and_judge(case, cluster, 1.5, -0.5, seed)


def test_an_executable_runs_again_with_other_scalars_and_matrices():
    case = Pushed()
    with Cluster(case.build()) as cluster:
        for call, (alpha, beta) in enumerate([(1.0, 0.0), (2.0, 1.0), (-1.5, 0.25), (0.0, 3.0)]):
            assert run_and_judge(case, cluster, alpha, beta, call)


def test_counts_equal_those_of_the_schedule():
    case = Pushed()
    schedule = case.build()
    with Cluster(schedule) as cluster:
        cluster.load(case)
        for _ in range(2):
            reports = cluster.run()
            copies = schedule.copies()
            for rank, report in enumerate(reports):
                own = schedule.tasks["rank"] == rank
                assert report.tasks == int((own & (schedule.tasks["kind"] != Kind.JOIN)).sum())
                assert report.copy_bytes == int(copies[own[copies[:, 0]], 3].sum())


@pytest.mark.parametrize("disorder", [None, Disorder(seed=3)])
def test_a_traced_run_times_every_body_from_its_start_to_its_end_and_others_none(disorder):
    pause_s = 0.01

    def linger(task: int, code: Code, written: np.ndarray) -> None:
        if code is Code.COMBINE:
            time.sleep(pause_s)  # before the body ends

    with Cluster(Pushed(ranks=1).build(), disorder=disorder, faults={0: linger}) as cluster:
        cluster.load(Pushed(ranks=1))
        (executable,) = cluster.executables
        executable.prepare_trace()
        before = time.monotonic()
        report = executable.run(alpha=1.0, beta=1.0, epoch=cluster.epoch, timeout_s=20.0, traced=True)
        after = time.monotonic()
        times, tasks = report.times, cluster.schedule.tasks
        assert times is not None
        assert sorted(times.tasks) == np.flatnonzero(tasks["kind"] != Kind.JOIN).tolist()
        assert before <= times.start_s.min() <= times.end_s.max() <= after
        combines = tasks["kind"][times.tasks] == Kind.COMBINE
        assert combines.any()
        assert (times.end_s - times.start_s >= np.where(combines, pause_s, 0.0)).all()
        again = executable.run(alpha=1.0, beta=1.0, epoch=cluster.epoch + executable.span, timeout_s=20.0)
        assert again.error is None
        assert again.times is None


@pytest.mark.parametrize("disorder", [None, Disorder(seed=3)])
def test_ranks_whose_runs_one_thread_polls_in_turn_give_the_product(disorder):
    case = Pushed()
    with Cluster(case.build(), disorder=disorder) as cluster:
        cluster.load(case)
        # Whoever waited for another rank in a poll would wait in vain.
        runs = [one.start(alpha=1.5, beta=0.5, epoch=1, timeout_s=5.0) for one in cluster.executables]
        while [run.poll() for run in runs].count(False):
            pass
        reports = [run.finish() for run in runs]
        succeed(reports)
        assert case.is_right(cluster.schedule, cluster.buffer(2), 1.5, 0.5, 0)
        bodies = cluster.schedule.tasks["kind"] != Kind.JOIN
        assert sum(report.tasks for report in reports) == bodies.sum()
        assert all(run.poll() for run in runs)


def test_a_run_that_is_begun_by_polls_is_ended_by_finish():
    case = Pushed(ranks=1)
    with Cluster(case.build()) as cluster:
        cluster.load(case)
        run = cluster.executables[0].start(alpha=1.5, beta=0.5, epoch=1, timeout_s=5.0)
        run.poll()
        report = run.finish()
        assert report.error is None
        assert run.finish() is report
        assert case.is_right(cluster.schedule, cluster.buffer(2), 1.5, 0.5, 0)


@pytest.mark.parametrize("error", [None, DeviceError, KeyboardInterrupt, "aborted", "stalled"])
def test_a_run_and_its_list_are_gone_with_their_last_reference_whatever_is_in_the_report(error):
    def fail(*unused):
        if isinstance(error, type):
            raise error("on purpose")

    gc.collect()
    gc.disable()
    try:
        with Cluster(Pushed(ranks=2 if error == "stalled" else 1).build(), faults={0: fail}) as cluster:
            executable = cluster.executables[-1]
            run = executable.start(alpha=1.0, beta=0.0, epoch=1, timeout_s=0.1)
            if error == "aborted":
                executable.board.abort[0] = 2
            report = run.finish()
            cluster.executables.remove(executable)
        gone = [weakref.ref(run), weakref.ref(executable), weakref.ref(cluster.board)]
        executable.close()
        del run, executable, cluster
        assert [one() for one in gone] == [None] * 3
    finally:
        gc.enable()
    expected = StallError if error == "stalled" else error if isinstance(error, type) else type(None)
    assert (type(report.error), report.aborted) == (expected, error == "aborted")


def test_a_polled_run_that_nobody_gets_on_with_ends_in_a_stall():
    with Cluster(Pushed(ranks=2).build()) as cluster:
        run = cluster.executables[1].start(alpha=1.0, beta=0.0, epoch=1, timeout_s=0.1)
        while not run.poll():
            pass
        error = run.finish().error
        assert isinstance(error, StallError)
        assert re.search(r"rank 1 has not got on: .*, waits for task \d+ of rank 0, B\(0,1\) 0->1", str(error))
        assert not cluster.board[-1].any()  # every rank finds a stall by itself


def test_progress_words_count_the_operations_of_each_lane_from_zero_in_every_call():
    case = Pushed(ranks=2)
    schedule = case.build()
    with Cluster(schedule, disorder=Disorder(3)) as cluster:
        cluster.load(case)
        for _ in range(2):
            cluster.board[:] = 12345
            cluster.run()
            for rank in range(2):
                program = lower(schedule).rank_list(rank)
                expected = np.bincount(program.operations["lane"], minlength=MAX_LANES)
                assert np.array_equal(cluster.board[rank], expected)


@pytest.mark.parametrize("epoch", [2**32 - 2, 2**31 - 1, 0])
def test_epochs_wrap_around(epoch):
    case = Pushed(ranks=2)
    with Cluster(case.build(), epoch=epoch) as cluster:
        for call in range(4):
            assert run_and_judge(case, cluster, 1.0, 0.5, call)


@pytest.mark.parametrize("seed", range(8))
def test_an_event_recorded_by_two_lanes_in_either_order_is_awaited_for_what_it_says(seed):
    build = ByHand()
    cells = build.add(0, 7)

    def copy(lane: int, source: int, *awaits: int) -> int:
        to, of = (cells._replace(row=at, rows=1) for at in (source + 1, source))
        return build.copy(build.compute_lane(0, lane), to, of, awaits)

    before = [copy(4, 3) for _ in range(6)]  # what keeps lane 0 from its record
    copy(1, 1, copy(0, 0, before[-1]))
    copy(3, 5, copy(2, 4))
    with Cluster(build.done(), disorder=Disorder(seed)) as cluster:
        assert lower(cluster.schedule).rank_list(0).num_events == 1
        cluster.buffer(0)[...] = np.array([[np.pi, np.nan, np.nan, np.e, np.e, np.nan, np.nan]]).T
        succeed(cluster.run(timeout_s=2.0))
        assert cluster.buffer(0)[:, 0].tolist() == [np.pi] * 3 + [np.e] * 4


# -- what a schedule or an executor gets wrong shows -------------------------------------------------


@pytest.mark.parametrize(("kind", "about"), [(Kind.JOIN, {}), (Kind.COMBINE, {"ranks": 1, "chunks": 2})])
def test_dropped_waits_for_copies_or_of_lanes_are_caught_in_random_order(kind, about):
    case = Pushed(**about)
    schedule = case.build()
    broken = set_rows(schedule, "tasks", schedule.tasks["kind"] == kind, num_awaits=0)
    verdicts = []
    for seed in range(12):
        with Cluster(broken, disorder=Disorder(seed, pause_s=2e-3)) as cluster:
            verdicts.append(run_and_judge(case, cluster, 1.0, 0.0, seed))
    assert not all(verdicts)


# -- failure -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_rank_that_raises_leaves_no_peer_waiting_and_the_next_call_works(failing, seed):
    case = Pushed()
    disorder = None if seed is None else Disorder(seed)
    fail = [True]
    ran = []

    def fault(task: int, code: Code, written: np.ndarray) -> None:
        ran.append(task)
        if fail[0] and len(ran) == 3:
            raise ValueError("planted")

    with Cluster(case.build(), faults={failing: fault}, disorder=disorder) as cluster:
        cluster.load(case)
        reports = cluster.run(timeout_s=5.0)
        assert isinstance(reports[failing].error, ValueError)
        succeed([report for rank, report in enumerate(reports) if rank != failing])
        fail[0] = False
        assert run_and_judge(case, cluster, 1.0, 0.0)


def long_copies(ranks: int, length: int) -> Schedule:
    """Each rank copies one number `length` times; then it awaits the rank before it, all of whose copies are done."""
    build = ByHand(ranks)
    last = []
    for rank in range(ranks):
        memory = build.add(rank, length + 1)
        spots = [memory._replace(row=i, rows=1) for i in range(length + 1)]
        for i in range(length):
            awaits = last[-1:] if i == length - 1 else []
            task = build.copy(build.copy_lane(rank, rank, rank), spots[i + 1], spots[i], awaits)
        last.append(task)
    return build.done()


@pytest.mark.parametrize("disorder", [None, Disorder(5)])
def test_a_failure_ends_a_long_call_on_every_rank_and_the_next_one_runs(disorder):
    length, began = 300, [0, 0, 0]
    fails = [True]

    def fault(rank: int) -> Callable[[int, Code, np.ndarray], None]:
        def after(task: int, code: Code, written: np.ndarray) -> None:
            began[rank] += 1
            # The first bodies of all ranks last until one has failed, which it does when all have begun.
            end = time.monotonic() + 20.0
            while fails[0] and time.monotonic() < end and not cluster.board[-1].any():
                if rank == 2 and all(began):
                    raise ValueError("planted")
                time.sleep(1e-3)

        return after

    with Cluster(long_copies(3, length), faults={rank: fault(rank) for rank in range(3)}, disorder=disorder) as cluster:
        reports = cluster.run()
        assert began == [1, 1, 1]
        assert [report.tasks for report in reports] == [1, 1, 0]
        assert [report.aborted for report in reports] == [True, True, False]
        assert [type(report.error) for report in reports] == [type(None), type(None), ValueError]
        fails[0] = False
        reports = cluster.run()
        succeed(reports)
        assert [(report.tasks, report.aborted) for report in reports] == 3 * [(length, False)]


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("epoch", [0, 2**32 - 1])
def test_a_rank_that_waits_for_one_that_hangs_ends_when_another_has_failed(begins, epoch):
    with Cluster(long_copies(2, 1), epoch=epoch) as cluster:
        cluster.executables[1].prepare_trace()
        run = cluster.executables[1].start(alpha=1.0, beta=0.0, epoch=epoch, timeout_s=20.0, traced=True)
        if begins:
            assert not run.poll()
        ProgressBoard(cluster.board, 0).abort[0] = epoch + 1
        report = run.finish()
        assert (report.tasks, report.aborted, report.error, report.times) == (0, True, None, None)


def test_a_long_product_ends_between_its_parts_when_another_rank_has_failed(monkeypatch):
    monkeypatch.setattr(bodies, "_PART_OPERATIONS", 2 * 8 * 6 * 2)  # two columns of eight
    real = np.matmul

    def watched(*operands, out):
        ProgressBoard(cluster.board, 0).abort[0] = cluster.epoch + 1
        return real(*operands, out=out)

    reads = [(8, 6, DType.f64, F.ALPHA, N), (6, 7, DType.f64, F.ONE, N)]
    with Cluster(one_task(Kind.GEMM, (8, 7, DType.f64), reads)) as cluster:
        cluster.buffer(0)[...] = np.nan
        monkeypatch.setattr(bodies.np, "matmul", watched)
        (report,) = cluster.run()
        monkeypatch.undo()
        assert (report.tasks, report.aborted, report.error) == (0, True, None)
        assert np.isnan(cluster.buffer(0)).any(axis=0).tolist() == 2 * [False] + 5 * [True]


def test_a_rank_that_hangs_is_named_by_those_that_wait_for_it():
    schedule = Pushed(ranks=2, chunks=1).build()
    released = threading.Event()

    def hang(task: int, code: Code, written: np.ndarray) -> None:
        released.wait(30.0)

    with Cluster(schedule, faults={0: hang}) as cluster:
        hanging, waiting = cluster.executables
        late: list[ExecutionReport] = []
        thread = threading.Thread(target=lambda: late.append(hanging.run(alpha=1.0, beta=0.0, epoch=1, timeout_s=20.0)))
        thread.start()
        error = waiting.run(alpha=1.0, beta=0.0, epoch=1, timeout_s=0.1).error
        released.set()
        thread.join(30.0)
        assert isinstance(error, StallError)
        assert re.search(r"rank 1 has not got on: .*, waits for task \d+ of rank 0, B\(0,1\) 0->1", str(error))
        assert late[0].error is None  # it was slow; the flags it awaited from rank 1 were written all the same


@pytest.mark.parametrize("dtype", [DType.f64, DType.f16], ids=lambda dtype: dtype.name)
def test_a_long_product_moves_its_progress_word_between_its_parts(monkeypatch, dtype):
    monkeypatch.setattr(bodies, "_PART_OPERATIONS", 2 * 8 * 6 * 2)  # two columns of eight
    seen: list[int] = []
    real = np.matmul

    def watched(*operands, out):
        seen.append(int(cluster.board.sum()))
        return real(*operands, out=out)

    a, b = uniform(8, 6, dtype=dtype, seed=1), uniform(6, 7, dtype=dtype, seed=2)
    schedule = one_task(Kind.GEMM, (8, 7, dtype), [(8, 6, dtype, Factor.ALPHA, Op.N), (6, 7, dtype, Factor.ONE, Op.N)])
    with Cluster(schedule) as cluster:
        cluster.buffer(1)[...], cluster.buffer(2)[...] = a, b
        cluster.buffer(0)[...] = np.nan
        monkeypatch.setattr(bodies.np, "matmul", watched)
        succeed(cluster.run(alpha=1.5))
        monkeypatch.undo()
        found = cluster.buffer(0).astype(np.float64)
    assert seen == [0, 1, 2, 3]
    wanted = 1.5 * a.astype(np.float64) @ b.astype(np.float64)
    assert np.allclose(found, wanted, rtol=0, atol=64 * dtype.unit_roundoff)


def test_a_product_that_takes_longer_than_is_allowed_is_no_stall_while_it_gets_on(monkeypatch):
    case = Pushed(ranks=2, chunks=1)
    monkeypatch.setattr(bodies, "_PART_OPERATIONS", 2 * case.m * case.k)  # a column at a time
    waiting: list[int] = []
    real = np.matmul

    def remember(task: int, code: Code, written: np.ndarray) -> None:
        waiting.append(threading.get_ident())

    def slow(*operands, out):
        if threading.get_ident() not in waiting:
            time.sleep(0.1)
        return real(*operands, out=out)

    # Rank 0 pushes the operands, before rank 1 can multiply.
    with Cluster(case.build(), faults={0: remember}) as cluster:
        monkeypatch.setattr(bodies.np, "matmul", slow)
        cluster.load(case)
        reports = cluster.run(timeout_s=0.8)
        monkeypatch.undo()
        succeed(reports)
        assert reports[1].issue_s > 1.0


class _Clock:
    """Time that passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_stall_is_the_time_allowed_without_a_change_of_any_rank_s_words(monkeypatch):
    clock = _Clock()
    monkeypatch.setattr("uncut_mpi.device.host.executor.time", clock)
    words = np.zeros(ProgressBoard.shape(3), np.uint32)
    patience = _Patience(ProgressBoard(words, 0), 2.0, spins=True)

    def wait_until(end_s: float) -> None:
        while clock.now < end_s:
            patience.wait(lambda: ["here", "there"])

    for _ in range(20):  # a peer gets on, though slowly
        words[2, 7] += 1
        wait_until(clock.now + 1.5)
    last = clock.now - 1.5
    with pytest.raises(StallError, match="for 2 s: here; there"):
        wait_until(1e9)
    assert 2.0 <= clock.now - last < 2.1
    patience = _Patience(ProgressBoard(words, 0), 2.0, spins=True)  # of the next wait, whose time starts anew
    last = clock.now
    with pytest.raises(StallError):
        wait_until(1e9)
    assert 2.0 <= clock.now - last < 2.1


def test_each_wait_of_a_run_has_a_time_of_its_own(monkeypatch):
    made = []

    class Recorded:
        def __init__(self, *_):
            made.append(self)

        def wait(self, _):
            pass

    monkeypatch.setattr("uncut_mpi.device.host.executor._Patience", Recorded)
    with Cluster(Pushed(ranks=1).build()) as cluster:
        ready = (worked for worked in (True, False, False, True, False, True))
        monkeypatch.setattr("uncut_mpi.device.host.executor.HostRun.turns", lambda run: ready)
        assert cluster.executables[0].run(alpha=1.0, beta=0.0, epoch=1, timeout_s=5.0).error is None
    assert len(made) == 2


# -- bodies --------------------------------------------------------------------------------------


def one_task(
    kind: Kind,
    write: tuple[int, int, DType],
    reads: Sequence[tuple[int, int, DType, Factor, Op] | tuple[Factor, Op]],
) -> Schedule:
    """A schedule of one task on one rank; a read of two parts is the region written itself."""
    build = ByHand()

    def region(rows: int, cols: int, dtype: DType) -> RegionRef:
        return build.add(0, rows, cols, dtype, ld=rows + 3)

    target = region(*write)
    operands = [(target, *read) if len(read) == 2 else (region(*read[:3]), *read[3:]) for read in reads]
    build.task(kind, build.compute_lane(0), target, operands)
    return build.done()


def run_one(schedule: Schedule, contents: Mapping[int, np.ndarray | float], alpha: float, beta: float) -> np.ndarray:
    with Cluster(schedule) as cluster:
        for index, values in contents.items():
            cluster.buffer(index)[...] = values
        succeed(cluster.run(alpha, beta))
        return cluster.buffer(0).copy()


def uniform(*shape: int, dtype: DType = DType.f64, seed: int = 0) -> np.ndarray:
    return random_values(np.random.default_rng(seed), shape, dtype)


@pytest.mark.parametrize("dtype", MEASURED, ids=lambda dtype: dtype.name)
def test_beta_zero_never_reads_c(dtype):
    a, b = uniform(6, 4, dtype=dtype), uniform(4, 5, dtype=dtype, seed=1)
    reads = [(6, 4, dtype, F.ALPHA, N), (4, 5, dtype, F.ONE, N), (F.BETA, N)]
    found = run_one(one_task(Kind.GEMM, (6, 5, dtype), reads), {0: np.nan, 1: a, 2: b}, 2.0, 0.0)
    wide = wide_of(dtype)
    product = 2.0 * (a.astype(wide) @ b.astype(wide))
    bound = 8.0 * (5 * dtype.unit_roundoff + 2.01 * dtype.operand_roundoff)  # |sum| <= 2 k
    bound *= 4 * of_both_parts(dtype) if dtype.is_complex else 1  # twice as many terms, each twice as large
    assert (np.abs(found.astype(wide) - product) <= bound).all()


@pytest.mark.parametrize("dtype", MEASURED, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("beta", [0.0, 1.0, 0.5])
def test_alpha_zero_never_reads_a_or_b_and_scales_c(dtype, beta):
    c = uniform(6, 5, dtype=dtype)
    reads = [(6, 4, dtype, F.ALPHA, N), (4, 5, dtype, F.ONE, N), (F.BETA, N)]
    start = c if beta else np.full_like(c, np.nan)
    found = run_one(one_task(Kind.GEMM, (6, 5, dtype), reads), {0: start, 1: np.nan, 2: np.inf}, 0.0, beta)
    wide = dtype.accumulator.numpy
    expected = (c.astype(wide) * beta).astype(dtype.numpy) if beta else np.zeros_like(c)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("dtype", MEASURED, ids=lambda dtype: dtype.name)
def test_combine_sums_in_the_accumulator_and_rounds_once(dtype):
    wide = dtype.accumulator
    c, other = uniform(9, 7, dtype=dtype), uniform(9, 7, dtype=dtype, seed=2)
    partial = uniform(9, 7, dtype=wide, seed=1)
    reads = [(9, 7, wide, F.ONE, N), (F.BETA, N), (9, 7, dtype, F.ALPHA, N)]
    found = run_one(one_task(Kind.COMBINE, (9, 7, dtype), reads), {0: c, 1: partial, 2: other}, 0.75, 1.25)
    total = c.astype(wide.numpy) * 1.25 + partial + other.astype(wide.numpy) * 0.75
    if dtype.sums_wider:  # factors and terms are exact in float32 up to its rounding
        exact = c.astype(np.float64) * 1.25 + partial.astype(np.float64) + other.astype(np.float64) * 0.75
        assert (np.abs(found.astype(np.float64) - exact) <= np.abs(exact) * dtype.unit_roundoff + 1e-6).all()
    else:
        assert np.allclose(found, total, rtol=0, atol=4 * dtype.unit_roundoff)


def test_combine_leaves_operands_of_factor_zero_unread_and_writes_zeros_without_any():
    reads = [(4, 3, DType.f64, F.ALPHA, N), (F.BETA, N), (4, 3, DType.f64, F.ZERO, N)]
    schedule = one_task(Kind.COMBINE, (4, 3, DType.f64), reads)
    kept = uniform(4, 3)
    assert np.array_equal(run_one(schedule, {0: np.nan, 1: kept, 2: np.nan}, 1.0, 0.0), kept)
    assert np.array_equal(run_one(schedule, {0: kept, 1: np.nan, 2: np.nan}, 0.0, 1.0), kept)
    assert np.array_equal(run_one(schedule, {0: np.nan, 1: np.nan, 2: np.nan}, 0.0, 0.0), np.zeros((4, 3)))
    empty = one_task(Kind.COMBINE, (4, 3, DType.f64), [])
    assert np.array_equal(run_one(empty, {0: np.nan}, 1.0, 1.0), np.zeros((4, 3)))


def test_combine_may_read_its_destination_twice_and_transposed():
    c = uniform(5, 5)
    reads = [(F.BETA, N), (F.ALPHA, T), (F.ONE, N)]
    found = run_one(one_task(Kind.COMBINE, (5, 5, DType.f64), reads), {0: c}, 2.0, 0.5)
    assert np.allclose(found, 0.5 * c + 2.0 * c.T + c, rtol=0, atol=1e-14)


def test_blocks_of_columns_cover_every_column(monkeypatch):
    monkeypatch.setattr("uncut_mpi.device.host.bodies._BLOCK_ELEMENTS", 1)
    monkeypatch.setattr("uncut_mpi.device.host.bodies._BLOCK_COLUMNS", 3)
    for dtype in (DType.f64, DType.f16):
        case = Pushed(dtype=dtype, ranks=2)
        with Cluster(case.build()) as cluster:
            assert run_and_judge(case, cluster, 1.2345, 1.1154)


def test_copies_keep_every_bit_of_values_that_are_no_numbers():
    bits = np.arange(0x7F80, 0x7F80 + 12, dtype=np.uint16).reshape(4, 3, order="F")
    schedule = one_task(Kind.COPY, (4, 3, DType.bf16), [(4, 3, DType.bf16, F.ONE, N)])
    found = run_one(schedule, {1: bits.view(DType.bf16.numpy)}, 1.0, 0.0)
    assert np.array_equal(found.view(np.uint16), bits)


@pytest.mark.parametrize("dtype", [*MEASURED, DType.i8], ids=lambda dtype: dtype.name)
def test_copies_that_transpose_keep_every_bit_and_touch_nothing_else(dtype):
    with Cluster(transposing_copies(dtype)) as cluster:
        wanted = filled(cluster.schedule, lambda index, values: np.copyto(cluster.buffer(index), values), 1)
        succeed(cluster.run())
        found = [bits_of(cluster.buffer(index)) for index in range(len(wanted))]
        assert all(map(np.array_equal, found, wanted))


@pytest.mark.parametrize(
    ("kind", "write", "reads"),
    [
        (Kind.COPY, (4, 3, DType.f64), [(3, 4, DType.f64, F.ONE, N)]),
        (Kind.COPY, (4, 3, DType.f64), [(4, 3, DType.f64, F.ONE, T)]),
        (Kind.COPY, (4, 3, DType.f64), [(4, 3, DType.f32, F.ONE, N)]),
        (Kind.GEMM, (4, 3, DType.f64), [(4, 5, DType.f64, F.ONE, N), (4, 3, DType.f64, F.ONE, N)]),
        (Kind.GEMM, (4, 3, DType.f64), [(4, 5, DType.f64, F.ONE, N)]),
        (Kind.COMBINE, (4, 3, DType.f64), [(3, 4, DType.f64, F.ONE, N)]),
    ],
)
def test_regions_that_do_not_fit_their_task_are_refused_when_bound(kind, write, reads):
    with pytest.raises(ScheduleError, match="task 0"):
        Cluster(one_task(kind, write, reads))


def test_a_gemm_that_accumulates_onto_another_region_is_refused():
    reads = [(4, 5, DType.f64, F.ONE, N), (5, 3, DType.f64, F.ONE, N), (4, 3, DType.f64, F.ONE, N)]
    with pytest.raises(ScheduleError, match="another region"):
        Cluster(one_task(Kind.GEMM, (4, 3, DType.f64), reads))


# -- the backend ---------------------------------------------------------------------------------


@pytest.fixture
def backend():
    made = HostBackend(0, 2)
    yield made
    made.close()


@pytest.mark.parametrize("order", ["F", "C"])
@pytest.mark.parametrize("dtype", MEASURED, ids=lambda dtype: dtype.name)
def test_device_arrays_and_their_views_are_known_and_can_be_opened_by_handle(backend, dtype, order):
    array = backend.empty(7, 5, dtype, order)
    assert array.shape == (7, 5)
    assert array.dtype == dtype.numpy
    assert array.flags.f_contiguous == (order == "F")
    array[...] = uniform(7, 5, dtype=dtype)
    view = array[2:, 1:]
    assert backend.owns(view)
    assert backend.owns(np.asarray(array).T)
    adopted = backend.adopt(view)
    assert adopted.obstacle == ""
    opened = backend.open(adopted.handle)
    assert opened != adopted.address - adopted.offset_bytes
    seen = np.ndarray(view.shape, view.dtype, buffer=_span(opened + adopted.offset_bytes, view), strides=view.strides)
    assert np.array_equal(seen.astype(wide_of(dtype)), view.astype(wide_of(dtype)))
    backend.close_peer(opened)


def _span(address: int, like: np.ndarray) -> np.ndarray:
    last = sum((extent - 1) * stride for extent, stride in zip(like.shape, like.strides, strict=True))
    return bytes_at(address, last + like.itemsize)


def test_arrays_from_elsewhere_are_no_device_arrays(backend):
    array = backend.empty(4, 4, DType.f64)
    assert not backend.owns(array + 1.0)
    assert not backend.owns(np.zeros((4, 4)))
    assert not backend.owns([[1.0]])
    with pytest.raises(ParamError, match="empty_device"):
        backend.adopt(np.zeros((4, 4)))


def test_memory_of_a_device_array_lives_as_long_as_its_views_and_no_longer(backend):
    array = backend.empty(64, 64, DType.f64)
    array[...] = 7.0
    view = array[1:3]
    del array
    gc.collect()
    assert backend.owns(view)
    assert (view == 7.0).all()
    address = view.__array_interface__["data"][0]
    del view
    gc.collect()
    assert backend._segment_of(matrix_at(address, 0, 0, 1, np.dtype("f8"))) is None
    assert not backend._arrays


def test_matrices_go_in_and_out_with_their_leading_dimension(backend):
    memory = backend.allocate(8 * 100)
    data = np.asfortranarray(uniform(6, 4))
    backend.from_host(memory.address, 9, data)
    assert np.array_equal(matrix_at(memory.address, 6, 4, 9, np.dtype("f8")), data)
    out = np.full((6, 4), np.nan, order="F")
    backend.to_host(memory.address, 9, out)
    assert np.array_equal(out, data)
    other = backend.allocate(8 * 100)
    backend.copy_matrix(other.address, memory.address, 6 * 8, 4, 9 * 8)
    assert np.array_equal(matrix_at(other.address, 6, 4, 9, np.dtype("f8")), data)
    assert not matrix_at(other.address, 9, 4, 9, np.dtype("f8"))[6:].any()
    for allocation in (memory, other):
        backend.free(allocation)
    with pytest.raises(DeviceError, match="free"):
        backend.free(memory)


def test_pinning_host_memory_leaves_nothing_to_undo(backend):
    assert backend.pin(4096, 4096) is Pin.FOREIGN


def test_ranks_share_the_memory_that_is_left():
    alone, crowd = HostBackend(0, 1), HostBackend(3, 1000)
    assert crowd.memory()[0] < alone.memory()[0]
    assert alone.identity().backend == "host"
    assert alone.identity().name


def blas_threads_now() -> set[int]:
    return {library["num_threads"] for library in threadpoolctl.ThreadpoolController().select(user_api="blas").info()}


def test_the_blas_is_named_with_its_version():
    loaded = threadpoolctl.ThreadpoolController().select(user_api="blas").info()
    name = HostBackend(0, 1).versions()["blas"]
    assert name == "unknown" if not loaded else name.endswith(str(loaded[0]["version"]))
    assert not loaded or name.lower().startswith(loaded[0]["internal_api"])


def test_blas_threads_are_the_cores_over_the_ranks_and_never_more_than_the_program_has_set(monkeypatch):
    monkeypatch.setattr("uncut_mpi.device.host.backend.usable_cores", lambda: 16)
    with threadpoolctl.threadpool_limits(8, user_api="blas"):
        assert blas_threads_now() == {8}
        assert [HostBackend(0, ranks)._blas.num_threads for ranks in (1, 4, 17)] == [8, 4, 1]


def test_blas_threads_are_bounded_while_bodies_run_and_as_before_afterwards(monkeypatch):
    monkeypatch.setattr("uncut_mpi.device.host.backend.usable_cores", lambda: 1)
    seen = []

    def look(task: int, code: Code, written: np.ndarray) -> None:
        seen.append(blas_threads_now())

    with threadpoolctl.threadpool_limits(5, user_api="blas"):
        with Cluster(Pushed(ranks=1).build(), faults={0: look}) as cluster:
            assert cluster.executables[0].run(alpha=1.0, beta=0.0, epoch=1, timeout_s=5.0).error is None
        assert seen
        assert set(map(frozenset, seen)) == {frozenset({1})}
        assert blas_threads_now() == {5}


def test_blas_threads_are_not_touched_where_there_are_no_more_than_may_be(monkeypatch):
    asked = []
    with threadpoolctl.threadpool_limits(1, user_api="blas"), Cluster(Pushed(ranks=1).build()) as cluster:
        monkeypatch.setattr(threadpoolctl.ThreadpoolController, "limit", lambda *_, **__: asked.append(1))
        assert cluster.executables[0].run(alpha=1.0, beta=0.0, epoch=1, timeout_s=5.0).error is None
    assert not asked


def test_blas_threads_are_as_before_after_runs_in_several_threads():
    before = blas_threads_now()
    with Cluster(Pushed().build(), disorder=Disorder(1, pause_s=1e-3)) as cluster:
        for _ in range(5):
            succeed(cluster.run())
    assert blas_threads_now() == before


def test_probes_return_positive_times(backend):
    memory = backend.allocate(1 << 16)
    assert backend.copy_seconds(memory.address, memory.address + 4096, 4096, 2) > 0
    for probe in [backend.copy_probe(memory.address, memory.address + 4096, 4096)] + [
        backend.gemm_probe(16, dtype) for dtype in MEASURED
    ]:
        assert probe.mean_seconds(0.0) > 0
        probe.close()


def test_a_probe_works_for_as_long_as_asked_and_returns_the_mean(monkeypatch):
    now, done = [100.0], []

    def work():
        done.append(1)
        now[0] += 0.3 if len(done) % 2 else 0.1

    probe = timeable(work, BlasThreads(1))
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    assert probe.mean_seconds(0.7) == pytest.approx(0.8 / 4)  # after one turn that is not timed: 0.1, 0.3, 0.1, 0.3
    assert len(done) == 5


def test_a_closed_executable_is_an_error_and_not_a_crash():
    case = Pushed(ranks=1)
    with Cluster(case.build()) as cluster:
        cluster.executables[0].close()
        with pytest.raises(DeviceError, match="closed"):
            cluster.executables[0].run(alpha=1.0, beta=0.0, epoch=1, timeout_s=1.0)


# -- tf32 ------------------------------------------------------------------------------------------


def test_tf32_rounds_operands_to_ten_bits_and_keeps_what_is_no_number():
    one = np.float32(1)
    values = np.array([1 + 2**-10, 1 + 2**-11, 1 + 2**-12, -1 - 2**-11, 0, -0.0, np.inf, -np.inf, np.nan], np.float32)
    array = np.concatenate([values, np.array([0x7FFFFFFF, 0x7F800001], np.uint32).view(np.float32)])
    out = np.empty_like(array)
    bodies.round_to_tf32(array, out)
    expected = np.array([1 + 2**-10, 1 + 2**-10, one, -1 - 2**-10, 0, -0.0, np.inf, -np.inf] + 3 * [np.nan], np.float32)
    np.testing.assert_array_equal(out, expected)
    assert np.signbit(out[5])


def test_tf32_products_are_those_of_rounded_operands():
    a, b = uniform(9, 40, dtype=DType.f32), uniform(40, 5, dtype=DType.f32, seed=1)
    reads = [(9, 40, DType.tf32, F.ALPHA, N), (40, 5, DType.tf32, F.ONE, N), (F.BETA, N)]
    found = run_one(one_task(Kind.GEMM, (9, 5, DType.tf32), reads), {0: np.nan, 1: a, 2: b}, 1.0, 0.0)
    rounded = [np.empty_like(a), np.empty_like(b)]
    bodies.round_to_tf32(a, rounded[0])
    bodies.round_to_tf32(b, rounded[1])
    exact = rounded[0].astype(np.float64) @ rounded[1].astype(np.float64)
    assert (np.abs(found - exact) <= 50 * DType.f32.unit_roundoff * (np.abs(a) @ np.abs(b))).all()
    assert np.abs(found - a.astype(np.float64) @ b).max() > 1e-5  # and not of those given
