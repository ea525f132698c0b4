"""DTensors and arrays of JAX on the ranks' GPUs, and products between the collective calls of both libraries."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.collective import collective_assert
from tests.mpi.test_interop import *  # noqa: F403  the same cases, collected here with this folder's fixtures
from tests.mpi.test_interop import device_of, gathered, jax_mesh, mesh_of, shard_of
from uncut_mpi import Layout

pytestmark = [
    pytest.mark.mpi(min_size=1),
    pytest.mark.multigpu(num=1),
    pytest.mark.filterwarnings("ignore"),
]

ROWS, COLS = 512, 384
STEPS = 5
SLEEP_CYCLES = 100_000_000  # about 0.05 s


def needs_own_gpus(session):
    if session.devices_shared:
        pytest.skip("NCCL wants a GPU for each rank")


def whole_numbers(rank, step, shape):
    """Numbers whose products and sums are exact."""
    return np.random.default_rng((rank, step)).integers(-3, 4, shape).astype(np.float64)


def test_products_between_collectives_of_nccl(comm, session, torch):
    needs_own_gpus(session)
    dist, device = torch.distributed, device_of(torch, session)
    mine = torch.zeros(ROWS, COLS, dtype=torch.float64, device=device)
    weights = torch.zeros(COLS, COLS, dtype=torch.float64, device=device)
    a, b = session.distribute(mine, Layout.rows()), session.distribute(weights, Layout.replicated())
    c = session.empty(a.shape, "f64", a.layout)
    result = torch.from_dlpack(c.local)
    with session.plan(a, b, c, reads_c=False) as plan:
        for step in range(STEPS):
            # Nothing here waits for the device: a product awaits torch's stream, and that awaits NCCL.
            torch.cuda._sleep(SLEEP_CYCLES)
            mine.copy_(torch.from_numpy(whole_numbers(comm.rank, step, mine.shape)), non_blocking=True)
            dist.all_reduce(mine)
            weights.copy_(torch.from_numpy(whole_numbers(100 + comm.rank, step, weights.shape)))
            dist.broadcast(weights, src=comm.size - 1)
            result.fill_(torch.nan)
            if step % 2:
                plan.execute()
            else:
                session.gemm(a, b, c)
            summed = result.clone()
            dist.all_reduce(summed)
            left = sum(whole_numbers(rank, step, mine.shape) for rank in range(comm.size))
            wanted = left @ whole_numbers(99 + comm.size, step, weights.shape)
            right = (
                np.array_equal(result.cpu().numpy(), wanted),
                np.array_equal(summed.cpu().numpy(), comm.size * wanted),
            )
            collective_assert(comm, right == (True, True), f"step {step}: product and sum of products right: {right}")
            if step == 2:  # communicators come and go
                dist.all_reduce(summed, group=(group := dist.new_group(backend="nccl")))
                dist.destroy_process_group(group)
    for one in (a, b, c):
        session.release(one)


def test_products_between_work_of_torch_and_of_jax_on_the_same_gpus(comm, session, torch, jax):
    needs_own_gpus(session)
    shape, inner = (64 * comm.size, COLS), (COLS, 32 * comm.size)
    mesh, torch_mesh = jax_mesh(jax, comm.size, ("x",)), mesh_of(torch, "cuda", comm.size, "S0")
    spec = jax.sharding.PartitionSpec
    rows, every = (jax.sharding.NamedSharding(mesh, spec(*axes)) for axes in (("x", None), ()))
    total = jax.jit(lambda x: x.sum(), out_shardings=every)  # by JAX's own NCCL
    double = jax.jit(lambda x: x * 2, out_shardings=rows)
    c = session.empty((shape[0], inner[1]), "f64", Layout.rows())
    for step in range(STEPS):
        first, second = whole_numbers(0, step, shape), whole_numbers(1, step, inner)
        given = double(jax.make_array_from_callback(shape, rows, lambda index, first=first: first[index]))
        a = session.from_jax(given)  # which may still be computed
        local = torch.from_numpy(second).to(device_of(torch, session)).chunk(comm.size, 1)[comm.rank].contiguous()
        torch.distributed.all_reduce(torch.ones(1, device=local.device))
        b = session.distribute(local, Layout.cols())
        session.gemm(a, b, c)
        wanted = 2 * first @ second
        found = gathered(session, comm, c)
        collective_assert(comm, np.array_equal(found, wanted), f"step {step}: {found[:2, :2]}")
        shown = c.to_jax(mesh)
        same = shard_of(shown).unsafe_buffer_pointer() == c.address
        summed = float(np.asarray(total(shown).addressable_shards[0].data))
        of_torch = float(c.to_dtensor(torch_mesh).full_tensor().sum())
        collective_assert(comm, same and summed == of_torch == wanted.sum(), f"step {step}: {summed}, {of_torch}")
        del shown
        for one in (a, b):
            session.release(one)
    session.release(c)
