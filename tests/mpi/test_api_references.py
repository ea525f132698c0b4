"""What calls, failed ones too, and ended sessions leave behind: nothing, without the garbage collector's help."""

from __future__ import annotations

import collections
import contextlib
import gc
import types

import pytest

import uncut_mpi as um
from tests.helpers.collective import collective_assert, outcome
from tests.helpers.faulty import FaultyBackend


class OnPurpose(Exception):
    """An error of a type that the package does not know."""


class Failing:
    """Opens sessions; `error`, while there is one, is raised on rank 0 by every task and when a plan is bound."""

    def __init__(self, comm):
        self.comm, self.error = comm, None

    def open(self, **options):
        class Backend(FaultyBackend):
            def executable(backend, *arguments):
                return self.fault() or super().executable(*arguments)

        def backend(rank, ranks):
            return Backend(rank, ranks, fault=self.fault)

        machine = um.Machine.uniform(self.comm.size)
        return um.Session(self.comm, **{"backend": backend, "machine": machine, "timeout_s": 20, **options})

    def fault(self, *unused):
        if self.error is not None and self.comm.rank == 0:
            raise self.error("on purpose")


@pytest.fixture
def failing(comm):
    return Failing(comm)


def is_ours(one):
    if isinstance(one, types.TracebackType):
        one = one.tb_frame
    if isinstance(one, types.FrameType):
        return one.f_globals.get("__name__", "").startswith("uncut_mpi")
    return type(one).__module__.startswith("uncut_mpi")


def garbage_of(work):
    """Return what `work` leaves for the garbage collector, of ours, by type."""
    gc.collect()
    gc.disable()
    try:
        work()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return collections.Counter(type(one).__name__ for one in gc.garbage if is_ours(one))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def alive():
    """Count what is alive of the classes whose objects hold memory."""
    gc.collect()  # of other tests
    names = ("Session", "Matrix", "GemmPlan", "Call", "HostExecutable", "HostRun", "Backend", "Segment", "Group")
    return collections.Counter(name for name in (type(one).__name__ for one in gc.get_objects()) if name in names)


def operands(session):
    a, c = (session.empty_host((16, 16)) for _ in range(2))
    if session.rank == 0:
        a.array[...] = 1.0
    d = session.empty_device((16, 16), rank=0)
    session.upload(a, d)
    return a, d, c


def products(failing, error, call, keep=lambda error: None):
    with failing.open() as session:
        a, d, c = operands(session)
        with session.plan(a, d, c) as plan:
            work = {
                "gemm": lambda: session.gemm(a, d, c),
                "gemm that binds": lambda: session.gemm(a, d, c, trans_a="T" if failing.error else "N"),
                "execute": plan.execute,
                "trace": plan.trace,
            }[call]
            for failing.error in (None, error):
                try:
                    work()
                except BaseException as caught:
                    keep(caught)
            failing.error = None
    session = plan = work = a = d = c = None  # the error refers to this frame


@pytest.mark.parametrize("error", [None, um.DeviceError, OnPurpose, KeyboardInterrupt])
@pytest.mark.parametrize("call", ["gemm", "gemm that binds", "execute", "trace"])
def test_a_product_and_its_session_leave_no_garbage_however_the_product_ends(comm, failing, error, call):
    left = garbage_of(lambda: products(failing, error, call))
    collective_assert(comm, not left, str(left))


@pytest.mark.parametrize("error", [um.DeviceError, OnPurpose, KeyboardInterrupt])
@pytest.mark.parametrize("call", ["gemm", "gemm that binds", "execute", "trace"])
def test_an_error_that_is_kept_keeps_nothing_that_a_call_worked_on(comm, failing, error, call):
    before, kept = alive(), []
    products(failing, error, call, kept.append)
    left = alive() - before
    collective_assert(comm, len(kept) == 1 and not left, f"{kept}: {left}")


def test_arguments_that_are_refused_leave_no_garbage(comm, failing):
    def work():
        with failing.open() as session:
            a = session.empty_host((4, 4))
            said = [
                outcome(lambda: session.gemm(a, 3)),
                outcome(lambda: session.gemm(a, a, beta=1.0)),
                outcome(lambda: session.empty_host((-1, 2))),
                outcome(lambda: session.register(5, root=0)),
                outcome(lambda: session.plan(a, a, None)),
                outcome(lambda: session.upload(a, None)),
                outcome(lambda: together(session)),
            ]
            if session.size > 1:
                said += [
                    outcome(lambda: session.agree(session.rank, "what differs")),
                    outcome(lambda: session.gather(0) if session.rank else session.barrier()),
                ]
            assert all("Error" in one for one in said), said

    def together(session):
        with session.together("on purpose"):
            raise um.ParamError("on purpose")

    left = garbage_of(work)
    collective_assert(comm, not left, str(left))


@pytest.mark.mpi(min_size=2)
def test_a_session_that_a_rank_leaves_is_gone_when_the_next_one_opens(comm, failing):
    def work():
        with contextlib.suppress(OnPurpose, um.PeerFailedError), failing.open() as session:
            a = session.empty_host((4, 4))
            if comm.rank == 0:
                raise OnPurpose
            session.gemm(a, a)
        session = a = None
        failing.open().close()

    left = garbage_of(work)
    collective_assert(comm, not left, str(left))


def test_a_session_that_cannot_open_leaves_no_garbage(comm, failing):
    def work():
        choices = [{"max_plans": 0}, {"timeout_s": 0}, {"backend": "opencl"}, {"backend": lambda *_: 1 / 0}]
        if comm.size > 1:
            choices.append({"max_plans": 1 + comm.rank})
        for options in choices:
            said = outcome(lambda options=options: failing.open(**options))
            assert "Error" in said, said

    left = garbage_of(work)
    collective_assert(comm, not left, str(left))
