"""
Random sequences of a session's calls against numpy, for hypothesis: all ranks draw the same ones.

After each step every rank has the numbers that numpy has in every matrix, or all ranks have an error of ours and the
numbers of before; a step knows which, where that is certain. Numbers are small and whole, so that results are exact.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import os
import random
import shutil
import signal
import tempfile

import hypothesis
import numpy as np
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

import uncut_mpi as um
from tests.helpers.collective import allgather, collective_assert
from tests.helpers.distributed import cut_up, distributed, fill, on_host, random_blocking, random_layout, shaken
from tests.helpers.numbers import op_of, wide_of
from tests.helpers.products import shows
from tests.helpers.sessions import left_behind, memories, ranks_per_node
from uncut_mpi import Layout, Location, ScheduleOptions
from uncut_mpi.api import lifetime
from uncut_mpi.model.dtypes import MEASURED, DType

TYPES = [one for one in MEASURED if one is not DType.tf32]
STEPS = 50
MOST_MATRICES = 8
WEIGHTS = {
    "create": 5, "view": 3, "alias": 1, "read": 2, "rewrite": 2, "move": 4, "release": 2, "gemm": 8, "plan": 2,
    "execute": 4, "several": 3, "odd": 1, "differently": 1, "others": 1, "interrupt": 1, "reopen": 1,
}  # fmt: skip
ODD = [
    ("empty", ((2, 2), "f64", "rows"), {}),
    ("empty_host", ((-1, 2),), {}),
    ("empty_device", ((2, 2),), {"rank": 9}),
    ("gather", (None,), {}),
    ("release", (np.ones((2, 2)),), {}),
    ("gemm", (None, None), {}),
    ("open_file", ("/nowhere/x.npy",), {}),
    ("create_file", ("/nowhere/x.npy", (2, 2), "f64"), {}),
    ("register", (np.ones((2, 2), int),), {"root": 0}),
    ("distribute", (np.ones((2, 2), np.float32), Layout.rows()), {"dtype": "f64"}),
    ("redistribute", (None, Layout.rows()), {}),
]


@dataclasses.dataclass(eq=False)
class Held:
    """
    A matrix and the numbers that numpy has for it.

    `base` is numpy's array, or a view of another one's where the matrix is one; `whole` is the matrix that it is of.
    """

    matrix: um.Matrix
    base: np.ndarray
    whole: Held | None = None
    conjugated: bool = False
    writeable: bool = True
    path: str = ""

    @property
    def root(self) -> Held:
        return self.whole or self

    def seen(self, matrix: um.Matrix, base: np.ndarray, *, conjugated: bool = False) -> Held:
        return dataclasses.replace(self, matrix=matrix, base=base, whole=self.root, conjugated=conjugated)

    def cut(self, rows: int, cols: int) -> Held:
        """Return so many rows and columns of it."""
        if (rows, cols) == self.base.shape:
            return self
        return self.seen(self.matrix[:rows, :cols], self.base[:rows, :cols], conjugated=self.conjugated)

    def op(self, trans: str) -> np.ndarray:
        data = self.base.astype(wide_of(self.matrix.dtype))
        return op_of(trans, data.conj() if self.conjugated else data)

    def arrays(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return what this rank has of it, each with numpy's numbers there."""
        if self.path:
            return []
        arrays, places = self.matrix.local, self.matrix.local_indices
        pairs = zip(arrays, places, strict=True) if isinstance(arrays, tuple) else [(arrays, places)]
        return [(array, self.base[np.ix_(*place)]) for array, place in pairs]

    def wrong(self) -> str:
        found = [(on_host(array), wanted) for array, wanted in self.arrays()]
        return "".join(f"{self.matrix!r}: {array} for {wanted}" for array, wanted in found if not same(array, wanted))


class Sequences(RuleBasedStateMachine):
    """A session, its matrices and plans, and what numpy says of them."""

    comm = baseline = counts = failures = numbers = None

    def __init__(self) -> None:
        super().__init__()
        self.trail: list[str] = []
        self.folder = self.comm.bcast(tempfile.mkdtemp() if self.comm.rank == 0 else None)
        self.open()

    @rule(seed=st.integers(0))
    def step(self, seed: int) -> None:
        """Do one thing; what needs matrices or plans makes some first."""
        rng = random.Random(f"{seed} {next(self.numbers)}")
        (what,) = rng.choices([*WEIGHTS], [*WEIGHTS.values()])
        if not self.held or (what in ("create", "view", "alias") and len(self.held) >= MOST_MATRICES):
            what = "release" if self.held else "create"
        if what == "execute" and not self.plans:
            what = "plan"
        self.trail.append(what)
        self.count("steps")
        getattr(self, what)(rng)
        self.check()

    # -- sessions ------------------------------------------------------------------------------

    def open(self) -> None:
        self.held: list[Held] = []
        self.plans: list[tuple[um.GemmPlan, tuple[Held, Held, Held], str, bool, bool | None]] = []
        self.session = shaken(self.comm, next(self.numbers))
        self.dtype = TYPES[next(self.numbers) % len(TYPES)]

    def end(self, *, interrupted: bool = False, left: bool = False) -> None:
        """Close the session, which ranks may have `left` by an error; nothing may be left behind."""
        broken = self.session.broken
        try:
            self.session.close()
        except um.UncutError:
            broken = True
        broken = any(allgather(self.comm, broken))
        files = [] if broken else [one for one in self.held if one.path and not one.whole]
        if any(allgather(self.comm, left)):  # what it had made has no name then
            files = [one for one in files if os.path.exists(one.path)]
        self.held, self.plans, self.session = [], [], None
        gc.collect()
        wrong = [one.path for one in files if self.comm.rank == 0 and not is_loaded(one)]
        self.must(not wrong, f"other numbers in {wrong}")
        if broken:  # the next session gives back what was left
            shaken(self.comm, 0).close()
        there = left_behind()
        # A device may still work on what an interrupt cut short; and it may come before a file's number has a name.
        if any(allgather(self.comm, bool(lifetime._in_use) or interrupted)):
            lifetime._in_use.clear()
            type(self).baseline = there
        self.must(not there - self.baseline, f"left behind: {there - self.baseline}")

    def teardown(self) -> None:
        if self.session is not None:  # which a failure may have ended
            self.end()
        if self.comm.rank == 0:
            shutil.rmtree(self.folder)

    def reopen(self, rng: random.Random) -> None:
        if rng.random() < 0.3:
            self.end()
            self.open()

    # -- what every step does --------------------------------------------------------------------

    def must(self, ok: bool, detail: str) -> None:
        """Fail on all ranks if `ok` is false on any; the first failure is what `run` raises."""
        try:
            collective_assert(self.comm, ok, detail)
        except BaseException as error:
            self.failures.append(f"{error}\nafter {self.trail}")
            raise

    def count(self, name: str, worked: bool = True) -> None:
        self.counts[name] = self.counts.get(name, 0) + worked

    def call(self, name: str, call, *, valid: bool | None = True):
        """
        Make a call on all ranks and return what it returns, None for an error that all have.

        `valid` says whether it has to work; None that both are right.
        """
        made, said = None, ""
        try:
            made = call()
        except um.UncutError as error:
            said = f"{type(error).__name__}: {error}"
        except Exception as error:
            said = f"not ours, {type(error).__name__}: {error}"
        everybody = allgather(self.comm, said)
        ours = not any(one.startswith("not ours") for one in everybody)
        right = len({*map(bool, everybody)}) == 1 and (valid is None or bool(said) is not valid)
        self.count(name, not said)
        if not (ours and right):
            self.must(False, f"{name} (valid: {valid}): {everybody}")
        return made

    def check(self) -> None:
        """Every array of this rank must have numpy's numbers."""
        wrong = "".join(one.wrong() for one in self.held if not one.whole)
        self.must(not wrong, wrong)

    def write_again(self, target: Held) -> None:
        """Write a file that a failed call may have touched: until then it has no name to get."""
        if target.path and target.writeable and any(one.root is target.root for one in self.held):
            self.write(target.root)

    def write(self, whole: Held) -> None:
        """Write numpy's numbers into a matrix, as its owners would."""
        if whole.path:
            source = self.session.empty_host(whole.base.shape, whole.matrix.dtype)
            if self.comm.rank == 0:
                source.array[...] = whole.base
            self.session.barrier()
            self.session.upload(source, whole.matrix)
            self.session.release(source)
            return
        self.session.barrier()
        for array, wanted in whole.arrays():
            fill(array, wanted)
        self.session.barrier()

    def random_numbers(self, rng: random.Random, shape: tuple[int, int], dtype: DType) -> np.ndarray:
        made = np.random.default_rng(rng.randrange(1 << 30)).integers(-2, 3, (2, *shape)).astype(np.float64)
        return (made[0] + 1j * made[1] if dtype.is_complex else made[0]).astype(dtype.numpy)

    # -- matrices ------------------------------------------------------------------------------

    def create(self, rng: random.Random) -> None:
        session, dtype = self.session, self.dtype if rng.random() < 0.9 else rng.choice(TYPES)
        data = self.random_numbers(rng, (rng.randint(1, 12), rng.randint(1, 12)), dtype)
        layout, order, root = (
            random_layout(rng, data.shape, session.size),
            rng.choice("CF"),
            rng.randrange(session.size),
        )
        orders, writeable = rng.choice(("C", "F", "CF")), rng.random() < 0.8
        array = np.zeros((data.shape[0] + 1, data.shape[1] + 2), data.dtype, order)[: data.shape[0], : data.shape[1]]
        array[...] = data
        mine, frozen = (None, None) if session.rank != root else (array, array.view())
        if frozen is not None:
            frozen.flags.writeable = writeable
        path, mode = os.path.join(self.folder, f"{next(self.numbers)}.npy"), "r+" if writeable else "r"
        memory = rng.choice(memories(session.size))
        how, call, empty = rng.choice(
            (
                ("distribute", lambda: distributed(session, rng, data, orders), False),
                ("distribute_parts", lambda: cut_up(session, rng, data, orders)[0], False),
                ("register", lambda: session.register(frozen, root=root), False),
                ("scatter", lambda: session.scatter(mine, layout, root, memory=memory), False),
                ("open_file", lambda: session.open_file(path, dtype=dtype, mode=mode), False),
                ("create_file", lambda: created(session, path, data.shape, dtype, order, commits=writeable), True),
                ("empty_host", lambda: session.empty_host(data.shape, dtype, order=order), True),
                ("empty_device", lambda: session.empty_device(data.shape, dtype, rank=root, order=order), True),
                ("empty", lambda: session.empty(data.shape, dtype, layout, order=order, memory=memory), True),
            )
        )
        if how == "open_file":
            if session.rank == 0:
                np.save(path, np.array(data, order=order))
            session.barrier()
        # Replicas and blocks dealt in turn are in no shared memory.
        made = self.call(how, call, valid=None if how in ("empty", "scatter") and memory == "shared" else True)
        if made is None:
            return
        held = Held(made, data, writeable=writeable or how not in ("register", "open_file"), path=made.info.file)
        if empty:
            self.write(held)
        self.held.append(held)
        if held.path:
            self.read_back(rng, held)

    def view(self, rng: random.Random) -> None:
        one, how = rng.choice(self.held), rng.choice("sssTH")
        if how == "s":
            key = tuple(slice(*sorted(rng.randint(0, end) for _ in "ab")) for end in one.base.shape)
            made = one.seen(one.matrix[key], one.base[key], conjugated=one.conjugated)
        else:
            conjugated = one.conjugated != (how == "H" and one.matrix.dtype.is_complex)
            made = one.seen(getattr(one.matrix, how), one.base.T, conjugated=conjugated)
        self.held.append(made)
        self.read_back(rng, made)

    def alias(self, rng: random.Random) -> None:
        """Register a piece of shared memory: two matrices in the same memory."""
        shared = [one for one in self.held if one.matrix.whole.location == Location.host() and not one.conjugated]
        if not shared:
            return
        one, root = rng.choice(shared), rng.randrange(ranks_per_node(self.session.size))
        rows, cols = (rng.randint(1, max(1, end)) for end in one.base.shape)
        mine = one.matrix.array[:rows, :cols] if self.session.rank == root else None
        made = self.call("register shared", lambda: self.session.register(mine, root=root), valid=None)
        if made is not None:
            self.held.append(Held(made, one.base[:rows, :cols], writeable=one.writeable))

    def read(self, rng: random.Random) -> None:
        self.read_back(rng, rng.choice(self.held))

    def read_back(self, rng: random.Random, one: Held) -> None:
        """Read a matrix in one of the ways there are."""
        session, root = self.session, rng.randrange(self.session.size)
        layout, how = random_layout(rng, one.base.shape, session.size), rng.choice(("gather", "download", "copy"))
        call = {
            "gather": lambda: (session.gather(one.matrix, root),),
            "download": lambda: session.download(one.matrix),
            "copy": lambda: session.redistribute(one.matrix, layout),
        }[how]
        made = self.call(how, call, valid=not one.conjugated)
        if how == "gather":
            wrong = made is not None and session.rank == root and not same(made[0], one.base)
            self.must(not wrong, f"gathered {one.matrix!r}: {made} for {one.base}")
        elif made is not None:
            wrong = Held(made, one.base).wrong() or (how == "download" and not shows(made, one.base, same))
            self.must(not wrong, f"{how} of {one.matrix!r}: {wrong}")
            session.barrier()
            if all(made is not other.matrix for other in self.held):
                session.release(made)

    def rewrite(self, rng: random.Random) -> None:
        """Write other numbers between calls, as a program does."""
        whole = rng.choice(self.held).root
        if whole.writeable:
            whole.base[...] = self.random_numbers(rng, whole.base.shape, whole.matrix.dtype)
            self.write(whole)

    def move(self, rng: random.Random) -> None:
        """Copy a matrix into another, by `upload` or `redistribute`."""
        source, target = rng.choice(self.held), rng.choice(self.held)
        if rng.random() < 0.8:
            shape = tuple(map(min, source.base.shape, target.base.shape))
            source, target = source.cut(*shape), target.cut(*shape)
        fits = source.base.shape == target.base.shape and source.matrix.dtype is target.matrix.dtype
        valid = fits and target.writeable and not target.conjugated and not source.conjugated
        overlap, new = overlaps(source, target), source.base.copy()
        if overlap and valid:
            itself = source.base.__array_interface__ == target.base.__array_interface__
            valid = None if itself or overlap is None else False
        session = self.session
        if rng.random() < 0.5:
            name, call = "redistribute", lambda: session.redistribute(source.matrix, None, out=target.matrix)
        else:
            valid = valid if source.matrix.whole.location == Location.host() else False
            name, call = "upload", lambda: session.upload(source.matrix, target.matrix) or target.matrix
        if self.call(name, call, valid=valid) is not None:
            target.base[...] = new
        else:
            self.write_again(target)

    def release(self, rng: random.Random) -> None:
        one = rng.choice(self.held)
        is_view = one.matrix is not one.root.matrix
        self.call("release", lambda: self.session.release(one.matrix), valid=not is_view)
        if not is_view:
            self.held = [other for other in self.held if other.root is not one.root]
            self.call("use of what was released", lambda: self.session.gather(one.matrix), valid=False)

    # -- products ------------------------------------------------------------------------------

    def operands(self, rng: random.Random) -> tuple[tuple[Held, Held, Held], str]:
        """Return A, B and C, and the ops of A and B, which mostly fit each other."""
        one = rng.choice(self.held)
        alike = [other for other in self.held if other.matrix.dtype is one.matrix.dtype]
        targets = [other for other in alike if other.writeable and not other.conjugated] or alike
        c = rng.choice(targets if rng.random() < 0.95 else self.held)
        apart = [other for other in alike if not overlaps(other, c)] or alike
        a, b = (rng.choice(apart if rng.random() < 0.95 else self.held) for _ in "ab")
        trans = rng.choice("NTC") + rng.choice("NTC")
        if rng.random() < 0.95:
            (m, k), (k_too, n) = op_of(trans[0], a.base).shape, op_of(trans[1], b.base).shape
            m, n, k = min(m, c.base.shape[0]), min(n, c.base.shape[1]), min(k, k_too)
            a, b = a.cut(*((m, k) if trans[0] == "N" else (k, m))), b.cut(*((k, n) if trans[1] == "N" else (n, k)))
            c = c.cut(m, n)
        return (a, b, c), trans

    def options(self, rng: random.Random) -> ScheduleOptions:
        blocking = random_blocking(rng, self.session.size)
        made = rng.choice((ScheduleOptions(), blocking, ScheduleOptions("uncut", tile=rng.choice((0, 4)))))
        made = dataclasses.replace(made, device_memory=rng.choice((0, 0, 0, 0, 1000, 3000)))
        return dataclasses.replace(made, host_memory=rng.choice((0, 0, 0, 0, 500, 3000)))

    def valid(self, operands: tuple[Held, Held, Held], trans: str, options: ScheduleOptions) -> bool | None:
        """Return whether a product has to work; None if that is not certain."""
        a, b, c = operands
        (m, k), (k_too, n) = op_of(trans[0], a.base).shape, op_of(trans[1], b.base).shape
        same_types = a.matrix.dtype is b.matrix.dtype is c.matrix.dtype
        if (m, n) != c.base.shape or k != k_too or not same_types or not c.writeable or c.conjugated:
            return False
        found = [overlaps(x, c) for x in (a, b)]
        if True in found:
            return False
        return None if None in found or options.device_memory or options.host_memory else True

    def scalars(self, rng: random.Random, dtype: DType) -> tuple[complex, complex]:
        of_complex = (1j,) if dtype.is_complex else ()
        return rng.choice((1, -1, 2, 0, *of_complex)), rng.choice((0, 1, -1, *of_complex))

    def gemm(self, rng: random.Random) -> None:
        operands, trans = self.operands(rng)
        a, b, c = operands
        (alpha, beta), options, session = self.scalars(rng, c.matrix.dtype), self.options(rng), self.session
        how = {"trans_a": trans[0], "trans_b": trans[1], "alpha": alpha, "options": options}
        valid = self.valid(operands, trans, options)
        if rng.random() < 0.8:
            made = self.call("gemm", lambda: session.gemm(a.matrix, b.matrix, c.matrix, beta=beta, **how), valid=valid)
            if made is not None:
                self.take(operands, trans, alpha, beta)
            else:
                self.write_again(c)
            return
        product = Held(c.matrix, np.zeros((len(op_of(trans[0], a.base)), op_of(trans[1], b.base).shape[1])))
        layout = rng.choice((None, None, "auto", random_layout(rng, product.base.shape, session.size)))
        fits = op_of(trans[0], a.base).shape[1] == len(op_of(trans[1], b.base)) and a.matrix.dtype is b.matrix.dtype
        certain = not (options.device_memory or options.host_memory or a.matrix.dtype is not c.matrix.dtype)
        certain &= not (a.path or b.path)
        made = self.call(
            "gemm to a new C",
            lambda: session.gemm(a.matrix, b.matrix, **how, out_layout=layout),
            valid=(True if certain else None) if fits else False,
        )
        if made is not None:
            product = Held(made, np.zeros(product.base.shape, a.base.dtype))
            self.held.append(product)
            self.take((a, b, product), trans, alpha, 0)
            if len(self.held) > MOST_MATRICES:
                session.release(made)
                self.held.pop()

    def take(self, operands: tuple[Held, Held, Held], trans: str, alpha: complex, beta: complex) -> None:
        """Compare a product with numpy's, and write small numbers in its place if it has grown."""
        c = operands[2]
        multiply(operands, trans, alpha, beta)
        self.settle(c)

    def settle(self, c: Held) -> None:
        """Compare a matrix that was written with numpy's, and write small numbers in its place if it has grown."""
        if c.path:
            found = self.session.gather(c.root.matrix)
            wrong = found is not None and not same(found, c.root.base)
            self.must(not wrong, f"product in {c.matrix!r}: {found} for {c.root.base}")
        self.check()
        if np.abs(c.root.base).max(initial=0) > 3:
            c.root.base[...] = np.fmod(c.root.base.real.astype(np.float64), 3).astype(c.base.dtype)
            self.write(c.root)

    def plan(self, rng: random.Random) -> None:
        operands, trans = self.operands(rng)
        options, reads_c, session = self.options(rng), rng.random() < 0.7, self.session
        matrices, valid = [one.matrix for one in operands], self.valid(operands, trans, options)
        how = {"reads_c": reads_c, "trans_a": trans[0], "trans_b": trans[1], "options": options}
        made = self.call("plan", lambda: session.plan(*matrices, **how), valid=valid)
        if made is not None:
            self.plans.append((made, operands, trans, reads_c, valid))
            while len(self.plans) > 3:
                self.plans.pop(rng.randrange(3))[0].close()

    def execute(self, rng: random.Random) -> None:
        plan, operands, trans, reads_c, certain = rng.choice(self.plans)
        alpha, beta = self.scalars(rng, operands[2].matrix.dtype)
        alive = [one.root for one in self.held]
        valid = all(one.root in alive for one in operands) and (beta == 0 or reads_c)
        name = rng.choice(("execute", "execute", "trace"))
        if self.call(name, lambda: getattr(plan, name)(alpha, beta), valid=valid and certain) is not None:
            self.take(operands, trans, alpha, beta)
        else:
            self.write_again(operands[2])

    def several(self, rng: random.Random) -> None:
        """Begin products, some of what others make; each rank waits for some, in any order, and drops the rest."""
        session, own = self.session, random.Random(f"{rng.random()} {self.session.rank}")
        begun, written, depths = [], dict[Held, Held](), dict[Held, int]()
        for _ in range(rng.randint(1, 6)):
            operands, trans = self.operands(rng)
            a, b, c = operands
            (alpha, beta), options = self.scalars(rng, c.matrix.dtype), self.options(rng)
            depth = 1 + max(depths.get(one.root, 0) for one in (operands if beta else (a, b)))
            if depth > (1 if c.matrix.dtype.itemsize == 2 else 2):
                continue  # numbers would be too large to be exact
            how = {"trans_a": trans[0], "trans_b": trans[1], "alpha": alpha, "beta": beta, "options": options}
            made = self.call(
                "gemm begun",
                lambda of=operands, how=how: session.gemm(*(one.matrix for one in of), **how, wait=False),
                valid=self.valid(operands, trans, options),
            )
            if made is None:
                self.write_again(c)
                continue
            multiply(operands, trans, alpha, beta)
            depths[c.root] = max(depth, depths.get(c.root, 0))
            begun.append(made)
            written[c.root] = c
            del made
        for one in own.sample(begun, own.randint(0, len(begun))):
            one.wait()
        if rng.random() < 0.5:
            del begun
        session.barrier()
        for one in written.values():
            self.settle(one)

    # -- what goes wrong -------------------------------------------------------------------------

    def odd(self, rng: random.Random) -> None:
        """Make a wrong call on all ranks, or on one while the others meet."""
        name, arguments, named = rng.choice(ODD)
        session, guilty = self.session, rng.choice((None, rng.randrange(self.session.size)))
        call = getattr(session, name) if guilty in (None, session.rank) else lambda *_, **__: session.barrier()
        self.call(f"odd {name}", lambda: call(*arguments, **named), valid=False)

    def differently(self, rng: random.Random) -> None:
        """Pass another scalar, matrix or value on one rank, make another call there, or fail."""
        session, odd = self.session, self.session.rank == rng.randrange(self.session.size)
        (a, b, c), trans = self.operands(rng)
        other, how = rng.choice(self.held), rng.choice(("alpha", "matrix", "call", "agree", "together"))
        if session.size == 1 or (how == "matrix" and other.matrix is a.matrix):
            return

        def call():
            if how == "agree":
                return session.agree(odd, "a value")
            if how == "together":
                with session.together("a block"):
                    if odd:
                        raise um.ParamError("on purpose")
            if how == "call" and odd:
                return session.barrier()
            first, alpha = other if how == "matrix" and odd else a, 2 if how == "alpha" and odd else 1
            ops = {"trans_a": trans[0], "trans_b": trans[1]}
            return session.gemm(first.matrix, b.matrix, c.matrix, alpha=alpha, **ops)

        self.call(f"different {how}", call, valid=False)
        self.write_again(c)

    def others(self, rng: random.Random) -> None:
        session, ranks = self.session, [*range(self.session.size)]
        name, arguments, wanted = rng.choice(
            (
                ("barrier", (), None),
                ("agree", (7, "a number"), None),
                ("gather_values", (session.rank,), ranks),
                ("poison_softbuf", (), None),
            )
        )
        found = self.call(name, lambda: (getattr(session, name)(*arguments),))
        self.must(found == (wanted,), f"{name}: {found}")

    def interrupt(self, rng: random.Random) -> None:
        """Interrupt a rank at any moment of a call, as Ctrl-C does; the program leaves the session."""
        (a, b, c), trans = self.operands(rng)
        guilty, after_s = rng.randrange(self.session.size), rng.random() ** 2 * 0.01 + 1e-6
        after_s = after_s if self.session.rank == guilty else 0.0
        layout = random_layout(rng, a.base.shape, self.session.size)
        # What a product has written stays in a file, whether the interrupt comes in time or not.
        how = rng.choice(("copy", "new", "file") if c.path else ("gemm", "begun", "copy", "new", "file"))
        path, ops = os.path.join(self.folder, f"{next(self.numbers)}.npy"), {"trans_a": trans[0], "trans_b": trans[1]}
        said, hit = "", list[bool]()
        try:
            with contextlib.suppress(um.UncutError), self.session, alarm(after_s, hit):
                if how == "gemm":
                    self.session.gemm(a.matrix, b.matrix, c.matrix, **ops)
                elif how == "begun":
                    for _ in range(20):
                        self.session.gemm(a.matrix, b.matrix, c.matrix, **ops, wait=False)
                elif how == "copy":
                    self.session.redistribute(a.matrix, layout)
                elif how == "new":
                    self.session.empty_host((300, 300))
                else:
                    self.session.create_file(path, (300, 300), "f64")
        except BaseException as error:  # of an interrupt inside it numpy makes errors of other types
            said = "" if hit else f"{type(error).__name__}: {error}"
        self.must(not said, f"interrupted {how}: {said}")
        self.count("interrupts", bool(hit))
        a = b = c = None
        self.end(interrupted=how == "file" and bool(hit), left=bool(hit))
        self.open()


def created(session, path, shape, dtype, order, *, commits) -> um.Matrix:
    """Return the matrix of a new file, which has its name at once or at the end."""
    made = session.create_file(path, shape, dtype, order=order)
    if commits:
        session.commit(made)
    return made


def multiply(operands: tuple[Held, Held, Held], trans: str, alpha: complex, beta: complex) -> None:
    """Make a product with numpy."""
    a, b, c = operands
    result = alpha * (a.op(trans[0]) @ b.op(trans[1])) + (beta * c.op("N") if beta else 0)
    c.base[...] = result.astype(c.base.dtype)


def overlaps(x: Held, y: Held) -> bool | None:
    """Return whether writing one changes the other; None where only the outlines meet."""
    if not (x.base.size and y.base.size and np.may_share_memory(x.base, y.base)):
        return False
    return np.shares_memory(x.base, y.base) or None


def same(found: np.ndarray, wanted: np.ndarray) -> bool:
    return found.shape == wanted.shape and bool((found == wanted).all())


def is_loaded(one: Held) -> bool:
    """Return whether numpy reads the file of a matrix as it should be; a file that is not there is wrong too."""
    if not os.path.exists(one.path):
        return False
    found = np.load(one.path)
    return same(found.view(one.base.dtype) if found.dtype.kind == "V" else found, one.base)


@contextlib.contextmanager
def alarm(after_s: float, hit: list[bool]):
    """
    Raise KeyboardInterrupt in the block after some time, and note it; 0 never does.

    Nothing is collected meanwhile: what is raised in a callback of the collector, as hypothesis has one, is lost.
    """

    def stop(*_):
        hit.append(True)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, stop)
    gc.disable()
    try:
        signal.setitimer(signal.ITIMER_REAL, after_s)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        gc.enable()
        signal.signal(signal.SIGALRM, before)


def run(comm, seed: int, steps: int) -> dict[str, int]:
    """Make sequences with so many steps in all, or a few less, and return how often each call worked. Collective."""
    shaken(comm, 0).close()

    @hypothesis.seed(seed)
    class Here(Sequences):
        counts, failures, numbers = {}, [], itertools.count(seed << 32)

    Here.comm, Here.baseline = comm, left_behind()
    settings = hypothesis.settings(
        max_examples=max(1, steps // STEPS),
        stateful_step_count=STEPS,
        database=None,
        deadline=None,
        phases=[Phase.generate],  # which all ranks do alike, whatever time it takes
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    try:
        run_state_machine_as_test(Here, settings=settings)
    except BaseException:  # a second run of what depends on the time says nothing
        if Here.failures:
            raise AssertionError(f"seed {seed}: {Here.failures[0]}") from None
        raise
    return Here.counts
