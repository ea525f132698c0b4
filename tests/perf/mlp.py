"""
A layer of an MLP sharded over the GPUs, y = gelu(x w1) w2, beside PyTorch's DTensor: in turns, one process a GPU.

    mpiexec -n 2 python3 -m mpi4py tests/perf/mlp.py OUT.json [TOKENSxHIDDENxFF ...]

The tokens of x and y are dealt by rows, w1 by columns and w2 by rows, as PyTorch's sequence and tensor parallelism has
them. Versions: ours blocking and in flight, DTensor as it is, compiled, and compiled with PyTorch's asynchronous tensor
parallelism (`torch._inductor.config._micro_pipeline_tp`). In float8 (e4m3) scales are known beforehand, one a tensor,
gelu rounds to float8, and products come out in bfloat16; PyTorch's are `torch._scaled_mm` with and without
``use_fast_accum``. Times are host times from a barrier to the end of the stream, the slowest rank's; errors are those
of sampled rows beside float64, in the Frobenius norm. NVLink multicast stays off.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}

import torch
from common import in_turns
from mpi4py import MPI
from torch.distributed import _functional_collectives as collectives
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.functional import gelu

import uncut_mpi as um

SHAPES = "2048x4096x14336", "8192x4096x14336", "8192x8192x28672"
ROUNDS, CALLS = 12, 3
SAMPLED = 64
FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0


class Layer:
    """This rank's tensors of one shape and type, and the versions that compute y of them."""

    def __init__(self, session: Any, mesh: Any, shape: tuple[int, int, int], float8: bool) -> None:
        self.session, self.mesh, self.float8 = session, mesh, float8
        self.size, self.rank = session.size, session.rank
        self.tokens, self.hidden, self.wide = shape
        torch.manual_seed(session.rank)
        share = self.wide // self.size
        x = torch.randn(self.tokens // self.size, self.hidden, device="cuda")
        w1 = torch.randn(self.hidden, share, device="cuda") / self.hidden**0.5
        w2 = torch.randn(share, self.hidden, device="cuda") / self.wide**0.5
        self.scales: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)
        kind = torch.bfloat16
        if float8:
            largest = torch.stack([one.abs().amax() for one in (x, w1, gelu(x[:256] @ w1) * 1.2, w2)])
            torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
            self.scales = tuple(float(one) / LARGEST for one in largest)
            kind = FLOAT8
        s_x, s_1, self.s_h, s_2 = self.scales
        # Weights lie column by column, which is how float8 is multiplied.
        self.x = (x / s_x).to(kind)
        self.w1, self.w2 = ((w / s).T.contiguous().to(kind).T for w, s in ((w1, s_1), (w2, s_2)))
        del x, w1, w2
        self.act = torch.compile(self.rounded)
        self.tensors = [torch.tensor(s, device="cuda") for s in self.scales]

    def rounded(self, h: torch.Tensor, out: torch.Tensor) -> None:
        """Write gelu of the first product in the type of the second one."""
        out.copy_((gelu(h) / self.s_h).clamp(-LARGEST, LARGEST) if self.float8 else gelu(h))

    def ours(self) -> dict[str, Callable[[], torch.Tensor]]:
        """Return our versions: two plans, and what lies between them compiled by PyTorch."""
        session, rows, cols = self.session, um.Layout.rows(), um.Layout.cols()

        def matrix(part: torch.Tensor, layout: um.Layout) -> Any:
            if part.dtype is not FLOAT8:
                return session.distribute(part, layout)
            return session.distribute(part.view(torch.uint8), layout, dtype="e4m3")

        share = self.wide // self.size
        h = torch.empty(self.tokens, share, dtype=torch.bfloat16, device="cuda")
        act = torch.empty(self.tokens, share, dtype=self.x.dtype, device="cuda")
        y = torch.empty(self.tokens // self.size, self.hidden, dtype=torch.bfloat16, device="cuda")
        first = session.plan(matrix(self.x, rows), matrix(self.w1, cols), matrix(h, cols), reads_c=False)
        second = session.plan(matrix(act, cols), matrix(self.w2, rows), matrix(y, rows), reads_c=False)
        self.expected_s = [plan.summary.predicted_s for plan in (first, second)]
        s_x, s_1, s_h, s_2 = self.scales
        with_1, with_2 = ({"scale_a": a, "scale_b": b} if self.float8 else {} for a, b in ((s_x, s_1), (s_h, s_2)))

        def blocking() -> torch.Tensor:
            first.execute(**with_1)
            self.act(h, act)
            second.execute(**with_2)
            return y

        def in_flight() -> torch.Tensor:
            one = first.execute(wait=False, **with_1)
            one.wait_on()
            self.act(h, act)
            two = second.execute(wait=False, **with_2)
            two.wait_on()
            one.wait()
            two.wait()
            return y

        return {"uncut_mpi": blocking, "uncut_mpi, in flight": in_flight}

    def theirs(self) -> dict[str, Callable[[], torch.Tensor]]:
        """Return PyTorch's versions."""
        mesh, group = self.mesh, self.mesh.get_group().group_name
        x, w1, w2 = (
            DTensor.from_local(part, mesh, [Shard(dim)], run_check=False)
            for part, dim in ((self.x, 0), (self.w1, 1), (self.w2, 0))
        )
        s_x, s_1, s_h, s_2 = self.tensors

        def layer(x: DTensor, w1: DTensor, w2: DTensor) -> torch.Tensor:
            h = gelu(x.redistribute(mesh, [Replicate()]) @ w1)
            return (h @ w2).redistribute(mesh, [Shard(0)]).to_local()

        def layer8(fast: bool) -> Callable[..., torch.Tensor]:
            def scaled(a: torch.Tensor, b: torch.Tensor, s_a: torch.Tensor, s_b: torch.Tensor) -> torch.Tensor:
                return torch._scaled_mm(a, b, s_a, s_b, out_dtype=torch.bfloat16, use_fast_accum=fast)

            def run(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
                every = collectives.all_gather_tensor(x, 0, group)
                h = gelu(scaled(every, w1, s_x, s_1))
                h8 = (h / s_h).clamp(-LARGEST, LARGEST).to(FLOAT8)
                return collectives.reduce_scatter_tensor(scaled(h8, w2, s_h, s_2), "sum", 0, group)

            return run

        def compiled(run: Callable[..., torch.Tensor], pipelined: bool) -> Callable[..., torch.Tensor]:
            torch._dynamo.reset()
            enable_symm_mem_for_group(group)
            made = torch.compile(run, fullgraph=True, options={"_micro_pipeline_tp": pipelined})
            return lambda *given: made(*given)

        if self.float8:
            given = self.x, self.w1, self.w2
            runs = {"PyTorch": layer8(False), "PyTorch, fast": layer8(True)}
        else:
            given, runs = (x, w1, w2), {"DTensor": layer}
        found: dict[str, Callable[[], torch.Tensor]] = {}
        for name, run in runs.items():
            ways = {"": run, ", compiled": compiled(run, False), ", compiled, asynchronous": compiled(run, True)}
            for way, made in ways.items():
                found[name + way] = lambda made=made: collectives.wait_tensor(made(*given))
        return found

    def error(self, y: torch.Tensor) -> float:
        """Return the error of the first rows of rank 0's part, relative and in the Frobenius norm. Collective."""
        head = self.x[:SAMPLED].float().contiguous()
        torch.distributed.broadcast(head, 0)
        s_x, s_1, _, s_2 = self.scales
        h = gelu((head.double() @ self.w1.double()) * (s_x * s_1))
        exact = (h @ self.w2.double()) * s_2
        torch.distributed.all_reduce(exact)
        difference = (y[:SAMPLED].double() - exact).norm() / exact.norm()
        return MPI.COMM_WORLD.bcast(float(difference))


def timed(run: Callable[[], Any]) -> float:
    """Return what a call takes (s), the slowest rank's."""
    comm = MPI.COMM_WORLD
    torch.cuda.synchronize()
    comm.Barrier()
    start = time.perf_counter()
    for _ in range(CALLS):
        run()
    torch.cuda.synchronize()
    return comm.allreduce((time.perf_counter() - start) / CALLS, MPI.MAX)


def measure(layer: Layer, say: Callable[[str], None]) -> dict[str, Any]:
    """Time all versions of one layer in turns."""
    runs, about = {}, {}
    for name, run in (layer.ours() | layer.theirs()).items():
        start = time.perf_counter()
        try:
            error = layer.error(run())
        except Exception as failure:  # a version of PyTorch that cannot: said in the table
            about[name] = {"failed": f"{type(failure).__name__}: {failure}"[:600]}
            say(f"  {name}: {about[name]['failed'][:300]}")
            continue
        about[name] = {"error": error, "first_call_s": time.perf_counter() - start}
        timed(run)
        runs[name] = run
    samples: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for at in in_turns(len(names), ROUNDS):
        samples[names[at]].append(timed(runs[names[at]]))
    for name, times in samples.items():
        about[name] |= {"median_s": statistics.median(times), "samples_s": times}
        median, low, high = (1e3 * of(times) for of in (statistics.median, min, max))
        say(f"  {name:40} {median:8.3f} ms [{low:.3f} {high:.3f}]  error {about[name]['error']:.2e}")
    return {"versions": about, "expected_s": layer.expected_s}


def main(path: str, *shapes: str) -> None:
    """Measure every shape in bfloat16 and float8."""
    comm = MPI.COMM_WORLD

    def say(text: str) -> None:
        if comm.rank == 0:
            print(text, flush=True)

    with um.Session(comm, timeout_s=60) as session:
        port = comm.bcast(20000 + os.getpid() % 10000)
        device = torch.device("cuda", torch.cuda.current_device())
        torch.distributed.init_process_group(
            "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=comm.rank, world_size=comm.size, device_id=device
        )
        mesh = init_device_mesh("cuda", (comm.size,))
        about = {"devices": session.device_names, "versions": session.versions | {"torch": torch.__version__}}
        results: dict[str, Any] = about | {"layers": {}}
        for words in shapes or SHAPES:
            for float8 in (False, True):
                shape = tuple(int(word) for word in words.split("x"))
                say(f"{words} {'e4m3' if float8 else 'bf16'}")
                layer = Layer(session, mesh, shape, float8)
                results["layers"][f"{words} {'e4m3' if float8 else 'bf16'}"] = measure(layer, say)
                say(f"  expected {[round(s * 1e3, 3) for s in layer.expected_s]} ms")
                del layer
                if comm.rank == 0:
                    with open(path, "w", encoding="utf-8") as file:
                        json.dump(results, file, indent=1)
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
