"""
A transformer's MLP sharded as in tensor parallelism: y = gelu(x W1) W2, its gradients, and a step of descent.

    mpiexec -n 2 python -m mpi4py examples/mlp.py        (2 ranks; any number works)

Each rank has some tokens (rows of x), some columns of W1 and the same rows of W2. So it has some columns of x W1, and
what is done to their elements is local. A product takes what it needs from the other ranks. With GPUs try --tokens 8192
--hidden 4096 --wide 14336 --dtype tf32 --no-check, and --beside-torch.
"""

from __future__ import annotations

import argparse
import atexit
import os
import time
from typing import Any

import numpy as np
from mpi4py import MPI

import uncut_mpi as um

parser = argparse.ArgumentParser()
for name, extent in {"tokens": 96, "hidden": 64, "wide": 256}.items():
    parser.add_argument(f"--{name}", type=int, default=extent)
parser.add_argument("--dtype", choices=("f64", "f32", "tf32"), default="f64")
parser.add_argument("--steps", type=int, default=10, help="for the time of one")
parser.add_argument("--host", action="store_true", help="compute on CPUs, also where GPUs are")
parser.add_argument("--no-check", action="store_true", help="leave out the reference, which numpy computes on rank 0")
parser.add_argument("--beside-torch", action="store_true", help="let PyTorch's DTensors do the same")
options = parser.parse_args()
comm, tokens, hidden, wide = MPI.COMM_WORLD, options.tokens, options.hidden, options.wide
MADE = "y", "dx", "dW1", "dW2", "W1", "W2"
RATE = 1 / (tokens * wide)
SCALE, CUBE = (2 / np.pi) ** 0.5, 0.044715  # of gelu in its form with tanh
STEEP, BEND = 1.13, 0.8  # the largest slope of gelu, and of its slope
UNIT = float(np.finfo("f8" if options.dtype == "f64" else "f4").eps)  # twice that of rounding: tensor cores may cut off
ROUNDED = 2.0**-10 if options.dtype == "tf32" else 0.0  # A and B, before they are multiplied
SOME = 8 * UNIT  # more roundings than gelu or its slope is off by: of |h|, and of (1 + |h|) cubed


def gelu(h: Any) -> tuple[Any, Any]:
    """Return gelu of an array, and its derivative; numpy's functions take arrays of cupy, too."""
    tanh = np.tanh(SCALE * (h + CUBE * h * h * h))
    return 0.5 * h * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * h * (1 - tanh * tanh) * SCALE * (1 + 3 * CUBE * h * h)


def product(a: np.ndarray, b: np.ndarray, a_off: Any = 0, b_off: Any = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return A B, and how far from it a computed product may be, whose A and B may be off themselves."""
    # N. Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 3.5. Doubled: this is rounded as well.
    n, sizes = 2 * UNIT * a.shape[1], (abs(a) + a_off) @ (abs(b) + b_off)
    return a @ b, sizes * (n / (1 - n) + 3 * ROUNDED) + sizes - abs(a) @ abs(b)


def reference(x: Any, w1: Any, w2: Any, target: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return what `MADE` names, of float64, and for each the bound of its error."""
    h, h_off = product(x, w1)
    act, by = gelu(h)
    act_off, by_off = STEEP * h_off + SOME * (abs(h) + h_off), BEND * h_off + SOME * (1 + abs(h) + h_off) ** 3
    y, y_off = product(act, w2, act_off)
    dy, dy_off = y - target, y_off + SOME * (abs(y - target) + y_off)
    dact, dact_off = product(dy, w2.T, dy_off)
    dh, dh_off = dact * by, STEEP * dact_off + (abs(dact) + dact_off) * (by_off + 2 * SOME)
    dw1, dw2 = product(x.T, dh, 0, dh_off), product(act.T, dy, act_off.T, dy_off)
    both = (w1, *dw1), (w2, *dw2)
    new = [(w - RATE * dw, RATE * off + SOME * (abs(w) + RATE * (abs(dw) + off))) for w, dw, off in both]
    return [(y, y_off), product(dh, w1.T, dh_off), dw1, dw2, *new]


def step() -> list[um.Matrix]:
    """Go forward, back and down; return what `MADE` names."""
    session.gemm(x, w1, h)
    act.local[:], by = gelu(h.local)
    session.gemm(act, w2, y)
    dy.local[:] = y.local - target.local  # the loss is half the sum of the squares
    makes_dact, makes_dw2 = session.gemm(dy, w2.T, dact, wait=False), session.gemm(act.T, dy, dw2, wait=False)
    makes_dact.wait()
    dact.local[:] *= by  # while dW2 is made
    makes_dx, makes_dw1 = session.gemm(dact, w1.T, dx, wait=False), session.gemm(x.T, dact, dw1, wait=False)
    makes_dw2.wait()
    w2.local[:] -= RATE * dw2.local  # while dx and dW1 are made
    makes_dx.wait()
    makes_dw1.wait()
    w1.local[:] -= RATE * dw1.local
    return [y, dx, dw1, dw2, w1, w2]


def step_of_torch() -> Any:
    """Return the same step of DTensors, with weights of its own."""
    import torch
    from torch.distributed.tensor import Replicate, Shard, init_device_mesh

    at = f"tcp://localhost:{comm.bcast(20000 + os.getpid() % 10000)}"  # any port that is free
    torch.distributed.init_process_group(init_method=at, rank=comm.rank, world_size=comm.size)
    atexit.register(torch.distributed.destroy_process_group)
    torch.backends.cuda.matmul.allow_tf32 = options.dtype == "tf32"
    mesh = init_device_mesh("cuda" if session.backend_name == "cuda" else "cpu", (comm.size,))
    given = [one.to_dtensor(mesh).clone().requires_grad_() for one in (x, w1, w2)]
    wanted = target.to_dtensor(mesh)

    def step() -> list[Any]:  # what ColwiseParallel and RowwiseParallel do where tokens are sharded
        every = given[0].redistribute(placements=[Replicate()])
        y = torch.nn.functional.gelu(every @ given[1], approximate="tanh") @ given[2]
        y = y.redistribute(placements=[Shard(0)])
        slopes = torch.autograd.grad(y, given, y.detach() - wanted)
        for w, dw in zip(given[1:], slopes[1:], strict=True):
            w.detach().sub_(dw, alpha=RATE)
        return [one.detach() for one in (y, *slopes, *given[1:])]

    return step


with um.Session(comm, backend="host" if options.host else "auto") as session:
    x, target, y, dy, dx = (session.empty((tokens, hidden), options.dtype, um.Layout.rows()) for _ in range(5))
    h, act, dact = (session.empty((tokens, wide), options.dtype, um.Layout.cols()) for _ in range(3))
    w1, dw1 = (session.empty((hidden, wide), options.dtype, um.Layout.cols()) for _ in range(2))
    w2, dw2 = (session.empty((wide, hidden), options.dtype, um.Layout.rows()) for _ in range(2))
    rng = np.random.default_rng(session.rank)
    for one, size in ((x, 1), (w1, hidden), (w2, wide), (target, 1)):
        start = session.empty(one.shape, options.dtype, one.layout, memory="host")
        start.local[:] = rng.standard_normal(start.local.shape) / size**0.5
        session.redistribute(start, None, out=one)
    given = [] if options.no_check else [session.gather(one) for one in (x, w1, w2, target)]
    exact = reference(*(one.astype("f8") for one in given)) if given and session.rank == 0 else []
    steps = {"uncut_mpi": step} | ({"PyTorch": step_of_torch()} if options.beside_torch else {})
    for who, do in steps.items():
        made = [one if who == "uncut_mpi" else session.from_dtensor(one) for one in do()]
        found = [session.gather(one) for one in made if not options.no_check]
        for count in (3, options.steps):  # the first ones plan, and are not counted
            session.gather_values(float(made[1].local[0, 0]))  # waits for what all devices do
            began = time.perf_counter()
            for _ in range(count):
                do()
        session.gather_values(float(made[1].local[0, 0]))
        taken = (time.perf_counter() - began) / options.steps
        if session.rank == 0:
            print(f"{who}, {session.size} ranks, {session.backend_name} backend: {taken * 1e3:.3f} ms a step")
        shares = [(abs(one - value) / bound).max() for one, (value, bound) in zip(found, exact, strict=bool(exact))]
        if exact:
            print("errors, as shares of their bounds:", ", ".join(map("{} {:.1e}".format, MADE, shares)))
        if not all(share <= 1 for share in shares):
            raise SystemExit(f"an error of {who} is larger than its bound")
