"""
A job in which one rank meets a fault at a point of a call, and each rank notes what becomes of it.

Points are those that the core itself names: waits for other ranks (`Group.wait`), blocks in which a rank may fail alone
(`agreement.collective`), calls that open, steps of a product, codes of operations. A job without a fault lists them.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import resource
import signal
import sys
import threading
import time

import numpy as np
from mpi4py import MPI

import uncut_mpi as um
from uncut_mpi.api.calls import Calls
from uncut_mpi.api.gate import Gate
from uncut_mpi.api.plan_maker import PlanMaker
from uncut_mpi.device.host.executor import HostRun
from uncut_mpi.planning.lower import Code
from uncut_mpi.spmd import agreement
from uncut_mpi.spmd.group import Group
from uncut_mpi.spmd.launcher import rank_of_process
from uncut_mpi.spmd.turns import DeviceTurns

SPEC = "UNCUT_PLANTED"
"""In the environment, as JSON: folder, scenario, fault, point, rank, timeout_s."""
LATER_S = 0.02


class Planted(Exception):
    """What the fault ``exception`` raises."""


class Planter:
    """Notes the points that this rank passes, and has it meet its fault at one of them."""

    def __init__(self, spec):
        self.folder, self.rank = pathlib.Path(spec["folder"]), rank_of_process()
        self.fault = spec["fault"] if spec.get("rank") == self.rank else None
        self.point, self.phase, self.passed = spec.get("point"), "", {}
        self.session, self.matrices = None, ()
        self.note(event="began", pid=os.getpid())

    def note(self, **what):
        """Write a line of what has come."""
        with open(self.folder / f"{self.rank}.jsonl", "a") as file:
            file.write(json.dumps(what | {"s": time.monotonic()}) + "\n")

    def reach(self, what):
        """Pass a point."""
        name = f"{self.phase}: {what}"
        self.passed[name] = self.passed.get(name, 0) + 1
        if self.fault and name == self.point:
            fault, self.fault = self.fault, None
            self.note(event="planted")
            FAULTS[fault](self)

    def later(self, what):
        """Pass a point that comes while the device is at work."""
        if self.fault and f"{self.phase}: {what}" == self.point:
            threading.Timer(LATER_S, self.reach, [what]).start()
        else:
            self.reach(what)


def fail(planter):
    raise Planted("on purpose")


def end_silently(planter):
    os._exit(0)


def stay_away(planter):
    time.sleep(3600)


def lack_memory(planter):
    used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20),) * 2)


def lack_shared_memory(planter):
    # Of what no process may write more, memory that is shared is one.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16,) * 2)


def fill(folder):
    with contextlib.suppress(OSError), open(folder / "filled", "wb", buffering=0) as file:
        while file.write(bytes(1 << 16)):
            pass


def fill_shared(planter):
    fill(pathlib.Path("/dev/shm"))


def fill_disk(planter):
    fill(planter.folder / "disk")


def shrink(planter):
    os.truncate(planter.folder / "disk" / "a.npy", 4096)


def fork(planter):
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        planter.note(event="forked", status=status)
        return
    said = []
    for use in (lambda: planter.session.gemm(*planter.matrices), lambda: planter.session.barrier(), open_session):
        try:
            use()
            said.append("worked")
        except um.UncutError as error:
            said.append(str(error))
        except (AttributeError, TypeError):
            pass  # there is no session yet, or no matrices
    with contextlib.suppress(AttributeError):
        planter.session.close()
    planter.note(event="child", said=said)
    os._exit(0)  # as children of `multiprocessing` do; else mpi4py would finalise the MPI of the parent


def lose_messages(planter):
    transport = planter.session._backend.transport
    transport.send = lambda *unused: lambda: True


def fail_on_device(planter):
    import cupy

    cupy.RawKernel('extern "C" __global__ void bad(int *p) { *p = 1; }', "bad")((1,), (1,), (np.uint64(64),))


def lack_device_memory(planter):
    import cupy

    kept = planter.kept = []
    size = 1 << 36
    while size >= 1 << 20:
        try:
            kept.append(cupy.cuda.Memory(size))
        except cupy.cuda.runtime.CUDARuntimeError:
            size //= 2


FAULTS = {
    "exception": fail,
    "kill": lambda planter: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda planter: os.kill(os.getpid(), signal.SIGSTOP),
    "never calls": stay_away,
    "_exit(0)": end_silently,
    "host memory": lack_memory,
    "shared memory": lack_shared_memory,
    "full /dev/shm": fill_shared,
    "full disk": fill_disk,
    "file shrinks": shrink,
    "fork": fork,
    "lost message": lose_messages,
    "GPU error": fail_on_device,
    "GPU memory": lack_device_memory,
}


# -- points ------------------------------------------------------------------------------------


def announce(planter):
    """Have the core's names pass the planter."""

    def before(owner, name, what):
        method = getattr(owner, name)

        def passing(self, *arguments, **named):
            planter.reach(what(self, *arguments, **named))
            return method(self, *arguments, **named)

        setattr(owner, name, passing)

    before(Group, "wait", lambda self, begin, what, *_: f"at {what}")
    before(Gate, "open", lambda self, call, *_, **__: f"gate {call}")
    before(Gate, "go", lambda self, request, *_: f"gate {request.call}, in one go")
    before(Gate, "close", lambda *_: "verdict")
    before(DeviceTurns, "acquire", lambda *_: "turn")
    before(PlanMaker, "_plan_on_root", lambda *_, **__: "plan")
    before(HostRun, "_step", lambda self, lane, index: f"task {Code(self._program.codes[index]).name}")
    block = agreement.collective

    @contextlib.contextmanager
    def collective(group, what, timeout_s=None):
        with block(group, what, timeout_s):
            planter.reach(f"in {what}")
            yield

    agreement.collective = collective
    make = Calls.__init__

    def made(self, group, backend, *arguments, **named):
        bind = backend.executable

        def executable(*about):
            bound = bind(*about)
            run, start = bound.runner, bound.start

            def runner(*how):
                planter.reach("issue")
                planter.later("running")
                done = run(*how)
                planter.reach("end of tasks")
                return done

            def started(**how):
                planter.reach("issue")
                begun = start(**how)
                planter.reach("drain")
                return begun

            bound.runner, bound.start = runner, started
            return bound

        backend.executable = executable
        make(self, group, backend, *arguments, **named)

    Calls.__init__ = made


# -- scenarios ---------------------------------------------------------------------------------


def open_session(**about):
    world = MPI.COMM_WORLD
    limits = {"timeout_s": LIMIT_S, "arrival_timeout_s": LIMIT_S}
    machine = um.Machine.uniform(world.size) if BACKEND == "host" else None
    return um.Session(world, **{"backend": BACKEND, "machine": machine, **limits, **about})


def multiply(planter, phase, *matrices, **how):
    planter.phase = phase
    planter.reach("begin")
    done = planter.session.gemm(*matrices, **how)
    if how:
        planter.reach("in flight")
        done.wait()


def products(planter, **about):
    """Some products: the first, one that is repeated, one that is not waited for."""
    planter.phase = "open"
    planter.reach("begin")
    with open_session(**about) as session:
        planter.session, planter.phase = session, "make"
        planter.reach("begin")
        a = session.empty((SIZE, SIZE), "f64", um.Layout.rows())
        b = session.register(np.ones((SIZE, SIZE)) if session.rank == 0 else None, root=0)
        c = session.empty((SIZE, SIZE), "f64", um.Layout.cols())
        a.local[...] = 1.0
        planter.matrices = a, b, c
        multiply(planter, "first call", a, b, c)
        multiply(planter, "repeated call", a, b, c)
        multiply(planter, "in flight", a, b, c, wait=False)
        planter.phase = "check"
        session.barrier()  # which has a limit
        with session.together("checking"):
            if not (np.asarray(c.local if BACKEND == "host" else c.local.get()) == SIZE).all():
                raise AssertionError("C is wrong")
        planter.phase = "close"
        planter.reach("begin")


def nodes(planter):
    """The same, with each rank on a node of its own."""
    from uncut_mpi.model.ports import Net

    size = MPI.COMM_WORLD.size
    products(planter, ranks_per_node=1, machine=um.Machine.cluster(um.Machine.uniform(1), size, Net(10.0, 5e-6)))


def files(planter):
    """A product of matrices in files."""
    planter.phase = "open"
    folder = planter.folder / "disk"
    with open_session() as session:
        planter.session, planter.phase = session, "make"
        a, b = (session.open_file(folder / f"{name}.npy") for name in "ab")
        c = session.create_file(folder / "c.npy", (SIZE, SIZE), np.float64)
        planter.matrices = a, b, c
        multiply(planter, "first call", a, b, c)
        multiply(planter, "repeated call", a, b, c)
        planter.phase = "close"
        planter.reach("begin")


def command(planter):
    """The command of products, from files and into one."""
    from uncut_mpi.gemm import main

    folder, planter.phase = planter.folder / "disk", "command"
    planter.reach("begin")
    words = f"--backend {BACKEND} {folder}/a.npy {folder}/b.npy -o {folder}/c.npy --timeout {LIMIT_S}".split()
    sys.exit(main([*words, "--machine", "uniform"]))


SCENARIOS = {"node": products, "nodes": nodes, "files": files, "command": command}

if __name__ == "__main__":
    spec = json.loads(os.environ[SPEC])
    LIMIT_S, BACKEND = spec.get("timeout_s", 10), spec.get("backend", "host")
    SIZE = spec.get("size", 192)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    planter = Planter(spec)
    announce(planter)
    try:
        SCENARIOS[spec["scenario"]](planter)
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:
            planter.note(event="raised", error=f"{type(error).__name__}: {error}")
        raise
    finally:
        planter.note(event="passed", points=planter.passed)
