"""
Products beside their floor, other libraries and an older version, all in turns in one job.

    mpiexec -n 4 python3 -m mpi4py tests/perf/table.py OUT.json "f64 8192 0,0,0;h,h,h" "bf16 8192 rows,cols,rows@C" \
        ... [--libraries cublasxt,torch] [--old PACKAGE] [--options "devices=0,1" ...] [--seconds S] [--trace]

A problem is TYPE, SIZE (N or MxNxK) and places as ``--place`` has them, several with semicolons between. Its matrices
are made once. For each of its places these take turns in random order: the default plan, those of the options
(``name=value`` words), the plan of an older version under another name, the compute floor, and of the other libraries
the one that is fastest at its best setting; all of them are tried first. Each sample is the time of the slowest rank
between two barriers. Libraries run in these processes, so that they start once. `old_version.sh` makes an older version
(``--old``). It plans with the same machine, unless it cannot read that, or ``--old-machine`` names a file.

The floor is the longest of three times: compute (every GPU multiplies an equal share at once, cuBLAS called directly),
the busiest GPU port (each rank of a 2x2 grid needs its panels of A and B once, C travels once as a result; all ranks
share k where k is 8 times m and n) at the rate of one pair alone, and the host (every element of A, B and C once, C
twice) at the better of the rates in and in both directions of all GPUs at once. Of dealt matrices it is compute alone.

Every product is checked, the libraries' as well: C x beside alpha A (B x) + beta C x with a random vector. When SECONDS
have passed no more places begin; what is missing is named. ``--trace`` adds when each task of one call of the default
plan began and ended.
"""

import argparse
import contextlib
import functools
import importlib
import json
import pathlib
import statistics
import sys
import time

import cupy
import numpy as np
from common import in_turns, options_of, pool, source
from mpi4py import MPI

import uncut_mpi as um
from uncut_mpi.bench.baselines.serve import load
from uncut_mpi.bench.baselines.task import Matrices, Task
from uncut_mpi.bench.processes import BaselineProcess, SharedTask
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.places import Dealt, Places
from uncut_mpi.planning.grid import ProcessGrid

ALPHA, BETA = 1.2345, 0.1154  # with a larger beta halves would overflow in some hundred calls
CUDA_TYPES = {"f64": 1, "f32": 0, "tf32": 0, "f16": 2, "bf16": 14}
COMPUTE_TYPES = {"f64": 70, "f32": 68, "tf32": 77, "f16": 68, "bf16": 68}
IN_RANKS, APART = ("dtensor",), ("cublasmp", "cublasxt")
WARMUP, FEWEST, MOST, TURNS_S = 3, 7, 40, 3.0
TRIES, HOPELESS = 3, 1.5
PORT_BYTES, HOST_BYTES = 512 << 20, 192 << 20
COMM = MPI.COMM_WORLD


def say(*words):
    """Print once."""
    if COMM.rank == 0:
        print(*words, flush=True)


def everywhere(function):
    """Return what a function of this rank returns, or raise what any rank's raises on all of them."""
    try:
        found, error = function(), None
    except Exception as raised:  # whatever a foreign library raises: it is left out then
        found, error = None, f"{type(raised).__name__}: {raised}"
    finally:
        cupy.cuda.Device(COMM.rank).use()
    errors = [one for one in COMM.allgather(error) if one]
    if errors:
        raise RuntimeError(errors[0].split("\n")[0][:200])
    return found


# -- the floor ---------------------------------------------------------------------------------


def shares(m, n, k, ranks):
    """Return the product of one rank with equal shares, and whether ranks share k."""
    if k >= 8 * max(m, n):
        return (m, n, k // ranks), True
    grid = ProcessGrid.choose(ranks, None)
    return (m // grid.rows, n // grid.cols, k), False


class Floor:
    """Measures what the machine can do, with cuBLAS and copies of its own."""

    def __init__(self, session):
        self.session, self.rates = session, {}
        self.stream = cupy.cuda.Stream(non_blocking=True)

    def slowest(self, work, repeats):
        """Return the slowest rank's seconds of `work`, all ranks at once, sample by sample."""
        samples = []
        for _ in range(repeats):
            self.stream.synchronize()
            COMM.Barrier()
            start = time.perf_counter()
            work()
            self.stream.synchronize()
            samples.append(time.perf_counter() - start)
        return [max(of_ranks) for of_ranks in zip(*COMM.allgather(samples), strict=True)]

    def product(self, m, n, k, dtype, values):
        """Return what does one product of this rank."""
        block = cupy.asarray(values.view(np.uint8))

        def filled(count):
            operand = cupy.empty(count * DType[dtype].itemsize, np.uint8)
            for at in range(0, len(operand), len(block)):
                operand[at : at + len(block)] = block[: len(operand) - at]
            return operand

        a, b, c = filled(m * k), filled(k * n), filled(m * n)
        alpha, beta = (np.array(x, np.float64 if dtype == "f64" else np.float32) for x in (ALPHA, BETA))
        handle, kind = cupy.cuda.device.get_cublas_handle(), CUDA_TYPES[dtype]

        def work():
            with self.stream:
                cupy.cuda.cublas.gemmEx(
                    handle, 0, 0, m, n, k, alpha.ctypes.data, a.data.ptr, kind, m, b.data.ptr, kind, k,
                    beta.ctypes.data, c.data.ptr, kind, m, COMPUTE_TYPES[dtype], -1,
                )  # fmt: skip
            self.stream.synchronize()

        cupy.cuda.Device().synchronize()
        return work

    def port(self):
        """Return bytes per second that GPU 0 sends to the last one alone."""
        if "port" not in self.rates:
            rate = 0.0
            if COMM.rank == 0 and COMM.size > 1:
                with contextlib.suppress(cupy.cuda.runtime.CUDARuntimeError):  # the session has done it already
                    cupy.cuda.runtime.deviceEnablePeerAccess(COMM.size - 1)
                mine = cupy.zeros(PORT_BYTES, np.uint8)
                with cupy.cuda.Device(COMM.size - 1):
                    other = cupy.zeros(PORT_BYTES, np.uint8)
                    cupy.cuda.Device().synchronize()
                times = []
                for _ in range(8):
                    cupy.cuda.Device().synchronize()
                    start = time.perf_counter()
                    cupy.cuda.runtime.memcpyPeerAsync(
                        other.data.ptr, COMM.size - 1, mine.data.ptr, 0, PORT_BYTES, self.stream.ptr
                    )
                    self.stream.synchronize()
                    times.append(time.perf_counter() - start)
                rate = PORT_BYTES / min(times)
            self.rates["port"] = COMM.bcast(rate)
        return self.rates["port"]

    def host(self):
        """Return bytes per second of all GPUs at once: the better of in alone and both ways (3 in to 1 out)."""
        if "host" not in self.rates:
            runtime = cupy.cuda.runtime
            with_host = self.session.empty_host((COMM.size * HOST_BYTES // 8, 2), np.float64, order="F")
            with_host.array[COMM.rank * HOST_BYTES // 8 : (COMM.rank + 1) * HOST_BYTES // 8] = 0.5
            base = with_host.address + COMM.rank * HOST_BYTES
            back = base + COMM.size * HOST_BYTES
            device, result = cupy.zeros(HOST_BYTES, np.uint8), cupy.zeros(HOST_BYTES, np.uint8)
            second = cupy.cuda.Stream(non_blocking=True)
            rates = []
            for out in (0, HOST_BYTES // 3):

                def work(out=out):
                    runtime.memcpyAsync(device.data.ptr, base, HOST_BYTES, 1, self.stream.ptr)
                    if out:
                        runtime.memcpyAsync(back, result.data.ptr, out, 2, second.ptr)
                        second.synchronize()

                samples = self.slowest(work, 12)[2:]
                rates.append(COMM.size * (HOST_BYTES + out) / statistics.median(samples))
            self.session.release(with_host)
            self.rates |= {"host": max(rates), "host_in": rates[0], "host_both": rates[1]}
        return self.rates["host"]

    def others(self, m, n, k, dtype, places):
        """Return seconds of the busiest port and of the host."""
        size, ranks, host = DType[dtype].itemsize, COMM.size, 0.0
        wide = 4 if size == 2 else size
        if any(isinstance(one, Dealt) for one in (places.a, places.b, places.c)):
            return 0.0, 0.0
        (rows, cols, depth), split = shares(m, n, k, ranks)
        columns = n // cols
        out, into = [0.0] * ranks, [0.0] * ranks
        for matrix, extent in ((places.a, m * k), (places.b, k * n), (places.c, m * n)):
            if matrix.space == "host":
                host += (2 if matrix is places.c else 1) * extent * size
        for rank in range(ranks):
            for matrix, part in ((places.a, rows * depth), (places.b, depth * cols)):
                if matrix.space == "device" and matrix.rank != rank:
                    into[rank] += part * size
            if places.c.space == "device" and places.c.rank != rank:
                into[places.c.rank] += rows * cols * (wide if split else size)
                out[rank] += rows * cols * (wide if split else size)
        # An owner sends each byte that another rank needs once.
        for matrix, extent, part in ((places.a, m * k, rows * depth), (places.b, k * n, depth * cols)):
            if matrix.space == "device":
                alone = (columns if matrix is places.a else ranks // columns) == 1
                out[matrix.rank] += (extent - (part if split or alone else 0)) * size
        return max(*out, *into) / self.port(), host / self.host()


# -- the products ------------------------------------------------------------------------------


class Ours:
    """A version of this library with the matrices of one problem in host memory, and copies where a place says."""

    def __init__(self, package, machine):
        self.name = package
        self.package = importlib.import_module(package)
        self.command = importlib.import_module(f"{package}.command.product")
        self.parse = importlib.import_module(f"{package}.command.arguments").parse
        try:
            known = self.package.Machine.from_json(machine) if machine else None
        except self.package.ParamError as error:  # of another version, whose files have other fields
            say(f"{package} measures the machine for itself: {error}")
            known = None
        self.session = self.package.Session(COMM, timeout_s=30, machine=known)

    def make(self, m, n, k, dtype, sources):
        """Make the matrices in host memory."""
        self.arguments = self.parse(f"-m {m} -n {n} -k {k} --dtype {dtype}".split())
        self.dtype = importlib.import_module(f"{self.name}.model.dtypes").DType[dtype]
        made = [self.command.Source(one.rows, one.cols, "F", one.fill) for one in sources]
        self.host = self.command.make_product(self.session, self.arguments, (m, n, k), self.dtype, tuple(made), "F")

    def place(self, text):
        """Put copies where a place says."""
        places = importlib.import_module(f"{self.name}.model.places").Places.parse(text)
        self.placed = []
        for matrix, place in zip((self.host.a, self.host.b, self.host.c), (places.a, places.b, places.c), strict=True):
            if str(place) == "h":
                self.placed.append(matrix)
            else:
                self.placed.append(self.command._empty(self.session, matrix.shape, self.dtype, place, "F"))
                self.session.upload(matrix, self.placed[-1])

    def plan(self, options):
        """Plan and check one call; return the plan, its facts and its result's product with a vector."""
        start = time.perf_counter()
        plan = self.session.plan(*self.placed, reads_c=True, options=options)
        planned_s = time.perf_counter() - start
        self.session.upload(self.host.first_c, self.placed[2])
        self.session.poison_softbuf()
        plan.execute(ALPHA, BETA)
        about = plan.summary
        facts = {"how": f"{about.scheduler} {about.how}", "predicted_s": about.predicted_s, "plan_s": planned_s}
        facts |= {"first_s": time.perf_counter() - start, "digest": about.digest, "tasks": about.tasks}
        result = self.session.download(self.placed[2])
        COMM.Barrier()
        return plan, facts, result

    def forget(self, result):
        """Give a result back that is not C itself."""
        COMM.Barrier()
        if result is not self.placed[2]:
            self.session.release(result)

    def displace(self):
        """Give the copies back."""
        for matrix in self.placed:
            if all(matrix is not one for one in (self.host.a, self.host.b, self.host.c)):
                self.session.release(matrix)

    def release(self):
        """Give the matrices in host memory back."""
        self.command.release_product(self.session, self.host)


def times(matrix, vector):
    """Return the product of a matrix in host memory with a vector, in float64 on all ranks."""
    rows, cols = matrix.shape
    mine = slice(cols * COMM.rank // COMM.size, cols * (COMM.rank + 1) // COMM.size)
    out, x = cupy.zeros(rows), cupy.asarray(vector)
    step = max(1, (256 << 20) // (8 * rows))
    for first in range(mine.start, mine.stop, step):
        some = slice(first, min(first + step, mine.stop))
        part = matrix[:, some]
        if str(part.dtype) == "bfloat16":
            part = (cupy.asarray(part.view(np.uint16)).astype(np.uint32) << 16).view(np.float32)
        out += cupy.asarray(part).astype(np.float64) @ x[some]
    found = cupy.asnumpy(out)
    COMM.Allreduce(MPI.IN_PLACE, found)
    return found


class Library:
    """Another library in these processes: in all of them, or in the first alone."""

    def __init__(self, name):
        self.name, self.takes_part = name, name in IN_RANKS or COMM.rank == 0
        self.library = everywhere(lambda: self.loaded() if self.takes_part else None)

    def loaded(self):
        """Return the library."""
        return load(self.name, "cuda", COMM.size)

    def open(self, task, matrices):
        """Take a problem on."""
        self.product = everywhere(lambda: self.library.open(task, matrices) if self.takes_part else None)

    def call(self, setting):
        """Compute once; return the seconds if the library tells them, None if they are to be taken here."""
        told = 0.0
        if self.takes_part:
            told = self.product.call(setting)
            cupy.cuda.Device(COMM.rank).use()
        return told if self.name in APART else None

    def prepare(self):
        """Do what need not be timed before a call."""
        if self.takes_part:
            self.product.prepare()

    def timed(self, setting):
        """Return the slowest rank's seconds of one call."""

        def once():
            self.prepare()
            start = time.perf_counter()
            told = self.call(setting)
            return time.perf_counter() - start if told is None else told

        COMM.Barrier()
        return max(COMM.allgather(everywhere(once)))

    def settings(self):
        """Return the median of each setting that works, in s, and why others do not."""
        medians, failed = {}, {}
        for setting in COMM.bcast(self.product.settings if COMM.rank == 0 else None):
            try:
                everywhere(lambda: self.product.reset() if self.takes_part else None)
                self.timed(setting)  # compiles, allocates
                samples = [self.timed(setting)]
                while len(samples) < TRIES and samples[0] <= HOPELESS * min(medians.values(), default=samples[0]):
                    samples.append(self.timed(setting))
                medians[setting] = statistics.median(samples)
            except RuntimeError as error:
                failed[setting] = str(error)
        return medians, failed

    def result(self, setting):
        """Compute from the first C and store the result."""

        def work():
            if self.takes_part:
                self.product.reset()
                self.product.prepare()
                self.product.call(setting)
                self.product.store()

        everywhere(work)

    def close(self):
        """Give the problem back."""
        everywhere(lambda: self.product.close() if self.takes_part else None)


class Apart:
    """A library in processes of its own, as it slows what else runs in its processes; seen as `Library.library`."""

    def __init__(self, name, devices):
        self.name, self.devices = name, devices
        self.process = BaselineProcess(name, "cuda", devices)

    def open(self, task, matrices):
        """Take a problem on, its matrices copied; return it."""
        self.close()
        if not self.process.alive:  # which a failure has ended
            self.process = BaselineProcess(self.name, "cuda", self.devices)
        self.matrices = matrices
        self.shared = SharedTask(matrices.a, matrices.b, matrices.c, task.dtype)
        asked = self.shared.task(task.alpha, task.beta, task.place, task.compute)
        self.settings = [self.process.ask({"do": "begin", "task": asked.to_json()})["setting"]]
        return self

    def prepare(self):
        """Nothing: it prepares when it is asked to compute."""

    def call(self, setting):
        """Compute once and return how long that took."""
        return self.process.ask({"do": "time", "count": 1})["samples_s"][0]

    def reset(self):
        """Nothing: its processes begin with the first C."""

    def store(self):
        """Compute from the first C, and put the result where the matrices are; that ends the problem."""
        self.shared.poison()
        self.process.ask({"do": "end"})
        self.matrices.out[...] = self.shared.result()

    def close(self):
        """Give the memory back."""
        if hasattr(self, "shared"):
            self.shared.close()
            del self.shared


class ApartLibrary(Library):
    """A library in processes of its own, whose times are those that they tell."""

    def __init__(self, name, devices):
        self.devices = devices
        super().__init__(name)

    def loaded(self):
        """Return it."""
        return Apart(self.name, self.devices)


class Libraries:
    """The other libraries, of which one is measured in turns: the fastest, each at its best setting."""

    def __init__(self, names, devices):
        self.loaded, self.refused = [], {}
        for name in names:
            try:
                self.loaded.append(ApartLibrary(name, devices) if name in APART else Library(name))
            except RuntimeError as error:
                self.refused[name] = str(error)
        say("libraries:", [one.name for one in self.loaded], self.refused or "")

    def fastest(self, task, matrices, check):
        """Return the fastest one with the problem taken on and its setting, and what each one took and how right."""
        found, best = {}, None
        for one in self.loaded:
            try:
                one.open(task, matrices)
            except RuntimeError as error:
                found[one.name] = {"reason": str(error)}
                continue
            try:
                medians, failed = one.settings()
                if not medians:
                    raise RuntimeError(next(iter(failed.values())))
                setting = min(medians, key=medians.get)
                everywhere(lambda: matrices.out.fill(np.nan) if COMM.rank == 0 else None)
                one.result(setting)
                good = check(matrices.out)
                found[one.name] = {"setting": setting, "seconds": medians[setting], **good, "settings": medians}
                if good["good"] and (best is None or medians[setting] < found[best.name]["seconds"]):
                    best = one
            except RuntimeError as error:
                found[one.name] = {"reason": str(error)}
            with contextlib.suppress(RuntimeError):
                one.close()
        if best is not None:
            best.open(task, matrices)
            everywhere(lambda: best.product.reset() if best.takes_part else None)
        return best, found


def executed(plan):
    """Compute once."""
    plan.execute(ALPHA, BETA)


def measure(asked, versions, floor, libraries, problem, text):
    """Return what each way of computing one problem at one place takes."""
    dtype, (m, n, k), x, wanted, unit = problem
    places, ours = Places.parse(text), versions[0]
    whole = [
        None if isinstance(one, Dealt) or one.space == "host" else one.rank for one in (places.a, places.b, places.c)
    ]
    place = tuple(
        str(one) if isinstance(one, Dealt) else at
        for one, at in zip((places.a, places.b, places.c), whole, strict=True)
    )

    def check(result):
        found = times(result, x)
        error = float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
        # Sums of k terms in random order grow by the root of k; 16 is room for the norm of a vector.
        most = 16 * unit * (max(1.0, k**0.5) if dtype in ("f64", "f32") else 1.0)
        return {"error": error, "good": bool(error < most)}

    host = ours.host
    ways, cases, plans = [], [], []
    task = Task(m, n, k, DType[dtype], ALPHA, BETA, place, tuple(range(COMM.size)), b"", b"", b"", b"")
    best, others = libraries.fastest(
        task, Matrices(host.a.array, host.b.array, host.first_c.array, host.c.array), check
    )
    for version in versions:
        version.place(text)
        variants = ["", *asked.options] if version is ours else [""]
        for words in variants:
            options = options_of(words) if version is ours else version.package.ScheduleOptions()
            try:
                plan, facts, result = version.plan(options)
            except version.package.UncutError as error:
                say(f"{dtype} {m}x{n}x{k} {text} {words}: {error}")
                continue
            facts |= check(result.array)
            version.forget(result)
            plans.append(plan)
            cases.append({"way": words or ("ours" if version is ours else "old"), **facts})
            ways.append((lambda: None, functools.partial(executed, plan)))
    share, _ = shares(m, n, k, COMM.size)
    cases.append({"way": "floor"})
    ways.append((lambda: None, floor.product(*share, dtype, problem.values)))
    if best is not None:
        setting = others[best.name]["setting"]
        cases.append({"way": best.name, **others[best.name]})
        ways.append((best.prepare, lambda: best.call(setting)))
    once = []
    for prepare, work in ways:
        prepare()
        COMM.Barrier()
        start = time.perf_counter()
        work()
        once.append(time.perf_counter() - start)
    rounds = round(COMM.bcast(min(MOST, max(FEWEST, TURNS_S / sum(once)))))
    samples = [[] for _ in ways]
    for at in in_turns(len(ways), WARMUP + rounds):
        prepare, work = ways[at]
        prepare()
        COMM.Barrier()
        start = time.perf_counter()
        told = work()
        samples[at].append(time.perf_counter() - start if told is None else told)
    for case, mine in zip(cases, samples, strict=True):
        mine = [max(of_ranks) for of_ranks in zip(*COMM.allgather(mine), strict=True)][WARMUP:]
        case |= {"seconds": statistics.median(mine), "spread_s": [min(mine), max(mine)], "samples_s": mine}
    if asked.trace:
        traced = plans[0].trace(ALPHA, BETA)
        cases[0]["trace_us"] = [
            np.round(1e6 * np.nan_to_num(one, nan=-1e-6), 1).tolist() for one in (traced.start_s, traced.end_s)
        ]
    for plan in plans:
        plan.close()
    for version in versions:
        version.displace()
    if best is not None:
        best.close()
    cupy.get_default_memory_pool().free_all_blocks()
    compute_s = next(one["seconds"] for one in cases if one["way"] == "floor")
    port_s, host_s = floor.others(m, n, k, dtype, places)
    floors = {"compute_s": compute_s, "port_s": port_s, "host_s": host_s, "floor_s": max(compute_s, port_s, host_s)}
    return {"dtype": dtype, "m": m, "n": n, "k": k, "place": text, **floors, "cases": cases, "libraries": others}


def show(case):
    """Print one problem's times."""
    ms = {name: f"{1e3 * case[name]:.3f}" for name in ("floor_s", "compute_s", "port_s", "host_s")}
    say(f"{case['dtype']} {case['m']}x{case['n']}x{case['k']} {case['place']}: floor {ms.pop('floor_s')} ms {ms}")
    for one in case["cases"]:
        if one["way"] == "floor":
            continue
        low, high = (1e3 * seconds for seconds in one["spread_s"])
        words = f"   {one['way']:9} {1e3 * one['seconds']:9.3f} ms [{low:.3f}, {high:.3f}]"
        words += f" {case['floor_s'] / one['seconds']:.3f} of the floor"
        if "predicted_s" in one:
            off = one["predicted_s"] / one["seconds"] - 1
            words += f" expected {1e3 * one['predicted_s']:.3f} ({off:+.1%}) first {1e3 * one['first_s']:.0f}"
        verdict = "" if one["good"] else " WRONG"
        say(f"{words} error {one['error']:.0e}{verdict} | {one.get('how') or one['setting']}")


class Problem(tuple):
    """Type, extents, a vector, what C should give with it, and the unit roundoff; `values` are the random ones."""

    values: np.ndarray


def made(versions, text):
    """Make the matrices of one problem and return it."""
    dtype, size = text.split()[:2]
    m, n, k = (int(one) for one in (size.split("x") if "x" in size else [size] * 3))
    values = pool(DType[dtype])
    versions[0].make(m, n, k, dtype, (source(m, k, values), source(k, n, values), source(m, n, values)))
    host = versions[0].host
    for other in versions[1:]:
        copies = []
        for one in (host.a.array, host.b.array, host.first_c.array):

            def fill(out, down, along, one=one):
                out[...] = one[down, along]

            copies.append(importlib.import_module("uncut_mpi.command.product").Source(*one.shape, "F", fill))
        other.make(m, n, k, dtype, copies)
    COMM.Barrier()
    x = np.random.default_rng(5).random(n) - 0.5
    wanted = ALPHA * times(host.a.array, times(host.b.array, x)) + BETA * times(host.first_c.array, x)
    unit = {"f64": 2**-53, "f32": 2**-24, "tf32": 2**-11, "f16": 2**-11, "bf16": 2**-8}[dtype]
    problem = Problem((dtype, (m, n, k), x, wanted, unit))
    problem.values = values
    return problem


def main():
    """Measure every problem and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("problems", nargs="+")
    parser.add_argument("--libraries", default="")
    parser.add_argument("--old", default="")
    parser.add_argument("--machine", default="")
    parser.add_argument("--old-machine", default="")
    parser.add_argument("--options", action="append", default=[])
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--trace", action="store_true")
    asked = parser.parse_args()
    began, cases, missing = time.monotonic(), [], []
    cupy.cuda.Device(COMM.rank).use()
    versions = [Ours("uncut_mpi", asked.machine and pathlib.Path(asked.machine).read_text())]
    if asked.old:
        same = versions[0].session.machine.to_json()
        versions.append(Ours(asked.old, pathlib.Path(asked.old_machine).read_text() if asked.old_machine else same))
    session = versions[0].session
    libraries = Libraries([name for name in asked.libraries.split(",") if name], session.device_uuids)
    floor = Floor(session)
    for text in asked.problems:
        problem = None
        for place in text.split()[2].split(";"):
            if COMM.bcast(time.monotonic() - began) > asked.seconds:
                missing.append(f"{' '.join(text.split()[:2])} {place}")
                continue
            problem = problem or made(versions, text)
            cases.append(measure(asked, versions, floor, libraries, problem, place))
            show(cases[-1])
        if problem:
            for version in versions:
                version.release()
        if COMM.rank == 0:
            facts = {"devices": versions[0].session.device_names, "date": time.strftime("%Y-%m-%d"), "ranks": COMM.size}
            facts |= {"version": um.__version__, "rates": floor.rates, "missing": missing, "cases": cases}
            facts |= {"refused": libraries.refused, "machine": json.loads(versions[0].session.machine.to_json())}
            with open(asked.out, "w", encoding="utf-8") as file:
                json.dump(facts, file, indent=1)
    wrong = sum(not one.get("good", True) for case in cases for one in case["cases"])
    off = sorted(
        abs(one["predicted_s"] / one["seconds"] - 1) for case in cases for one in case["cases"] if one["way"] == "ours"
    )
    say(f"{len(cases)} measured, {wrong} wrong, missing {missing or 'none'}, {time.monotonic() - began:.0f} s; "
        f"rates GB/s {({name: round(rate / 1e9, 1) for name, rate in floor.rates.items()})}; "
        f"expected is off by {statistics.median(off):.1%} in the median, {off[-1]:.1%} at worst")  # fmt: skip
    for version in reversed(versions):
        version.session.close()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
