"""Gradients that torch records of `uncut_mpi.matmul`, against its own of the whole matrices."""

from __future__ import annotations

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers.collective import collective_assert, expect
from uncut_mpi import Layout

M, K, N = 5, 8, 4
TYPES = ["float64", "complex128", "float32"]


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


@pytest.fixture
def device(session):
    return "cpu" if session.backend_name == "host" else f"cuda:{session._backend._ordinal}"


@pytest.fixture
def whole(torch, device, comm):
    """Makes a tensor, the same on all ranks, of which a gradient is recorded."""
    generator = torch.Generator().manual_seed(3)

    def make(*shape, dtype="float64"):
        values = torch.randn(*shape, generator=generator, dtype=getattr(torch, dtype))
        return values.to(device).requires_grad_()

    return make


def rows_of(comm, tensor, rank=None):
    """This rank's share of a tensor's first dimension, by `numpy.array_split`."""
    extents = np.cumsum([0, *(len(one) for one in np.array_split(np.arange(len(tensor)), comm.size))])
    rank = comm.rank if rank is None else rank
    return tensor[extents[rank] : extents[rank + 1]]


def mine_of(comm, tensor):
    """This rank's share as a leaf of its own."""
    return rows_of(comm, tensor).detach().clone().requires_grad_()


def all_of(torch, comm, mine):
    parts = comm.allgather(mine.detach().resolve_conj().cpu())
    return torch.cat(parts).to(mine.device)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shapes", [((M, K), (K, N)), ((6, M, K), (6, K, N)), ((6, M, K), (K, N)), ((M, K), (6, K, N))])
def test_gradients_are_those_of_the_whole_matrices(comm, torch, device, whole, shapes, dtype):
    a, b = (whole(*shape, dtype=dtype) for shape in shapes)
    a_mine, b_mine = mine_of(comm, a), mine_of(comm, b)
    wanted = a @ b
    found = um.matmul(comm, a_mine, b_mine)
    weights = whole(*wanted.shape, dtype=dtype).detach()
    wanted.backward(weights)
    found.backward(rows_of(comm, weights))
    for its, mine in ((a, a_mine), (b, b_mine)):
        right = mine.grad.dtype == its.dtype and mine.grad.device == mine.device
        tolerance = 1e-5 if dtype == "float32" else 1e-12
        right &= torch.allclose(rows_of(comm, its.grad), mine.grad, tolerance, tolerance)
        collective_assert(comm, right, f"{mine.grad} of {rows_of(comm, its.grad)}")


def dealt(torch, comm):
    """Return functions of torch that deal equal tensors of all ranks, and gather them: each is the other's gradient."""

    class Deal(torch.autograd.Function):
        @staticmethod
        def forward(ctx, every):
            return rows_of(comm, every).clone()

        @staticmethod
        def backward(ctx, gradient):
            return Gather.apply(gradient)

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, mine):
            return all_of(torch, comm, mine)

        @staticmethod
        def backward(ctx, gradient):
            return Deal.apply(gradient)

    return Deal.apply, Gather.apply


@pytest.mark.parametrize("dtype", TYPES[:2])
@pytest.mark.parametrize("shapes", [((3, 4), (4, 2)), ((2, 3, 2), (2, 2, 1)), ((2, 2, 3), (3, 2)), ((3, 2), (2, 2, 2))])
def test_first_and_second_gradients_are_those_of_differences(comm, torch, whole, shapes, dtype):
    deal, gather = dealt(torch, comm)

    def product(a, b):
        return gather(um.matmul(comm, deal(a), deal(b)))

    given = [whole(*shape, dtype=dtype) for shape in shapes]
    for check, few in ((torch.autograd.gradcheck, dtype != "float64"), (torch.autograd.gradgradcheck, True)):
        torch.manual_seed(5)  # of the directions that are tried, where these are few; the same on all ranks
        good = check(product, given, raise_exception=False, fast_mode=few)
        collective_assert(comm, good, f"{check.__name__}: of differences others come")


def test_weights_alone_may_require_a_gradient_and_be_dealt_in_any_way(comm, torch, whole):
    a, b = whole(M, K), whole(K, N)
    mine = slice(0, 1 if comm.size > 1 else K) if comm.rank == 0 else slice(1 if comm.rank == comm.size - 1 else K, K)
    b_mine = b[mine].detach().clone().requires_grad_()
    x = rows_of(comm, a).detach()
    found = um.matmul(comm, x, b_mine)
    found.sum().backward()  # of a gradient that is one number, expanded
    (a.detach() @ b).sum().backward()
    right = b_mine.grad.shape == b_mine.shape and torch.allclose(b_mine.grad, b.grad[mine])
    collective_assert(comm, right, f"{b_mine.grad}")
    collective_assert(comm, x.grad is None and found.grad_fn is not None, f"{found}")


def test_steps_of_a_layer_lead_where_torchs_own_do(comm, torch, whole):
    """A linear layer under torch's optimizer, on data that is dealt by rows."""
    weight, x, y = whole(K, N), whole(12, K).detach(), whole(12, N).detach()
    mine = torch.nn.Parameter(rows_of(comm, weight).detach().clone())
    x_mine, y_mine = rows_of(comm, x), rows_of(comm, y)
    ours, theirs = torch.optim.SGD([mine], 0.01), torch.optim.SGD([weight], 0.01)
    for _ in range(5):
        for optimizer, loss in (
            (ours, lambda: ((torch.tanh(um.matmul(comm, x_mine, mine)) - y_mine) ** 2).sum()),
            (theirs, lambda: ((torch.tanh(x @ weight) - y) ** 2).sum()),
        ):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
    collective_assert(comm, torch.allclose(mine, rows_of(comm, weight)), f"{mine} of {rows_of(comm, weight)}")


def test_nothing_is_recorded_where_torch_records_nothing(comm, torch, whole):
    a, b = whole(M, K), whole(K, N)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            found = um.matmul(comm, rows_of(comm, a), rows_of(comm, b))
        collective_assert(comm, found.grad_fn is None and not found.requires_grad, f"{found}")
        collective_assert(comm, torch.allclose(all_of(torch, comm, found), a @ b), f"{found}")


def test_a_change_of_what_the_gradient_needs_is_torchs_own_error(comm, torch, whole):
    inner = 2 * comm.size  # so that the error is the same on all ranks
    a, b = mine_of(comm, whole(M, inner)), mine_of(comm, whole(inner, N))
    found = um.matmul(comm, a, b)
    with torch.no_grad():
        b.add_(1)
    expect(comm, RuntimeError, ["modified by an inplace operation"], lambda: found.sum().backward())


def test_ranks_that_disagree_about_gradients_are_told_so(comm, session, torch, whole):
    if comm.size == 1:
        pytest.skip("one rank")
    a, b = rows_of(comm, whole(M, K)).detach(), rows_of(comm, whole(K, N)).detach()
    given = a.clone().requires_grad_() if comm.rank == 0 else a
    parts = ["gradients: 'a_local' on rank 0, 'none' on "]
    expect(comm, um.RankMismatchError, parts, lambda: um.matmul(comm, given, b))
    with torch.set_grad_enabled(comm.rank == 0):
        recorded = b.clone().requires_grad_()
        parts = ["gradients: 'b_local' on rank 0, 'none' on "]
        expect(comm, um.RankMismatchError, parts, lambda: um.matmul(comm, a, recorded))


def test_what_records_no_gradient_is_refused_on_every_rank_with_what_to_do(comm, session, torch, whole, device):
    given, plain = mine_of(comm, whole(M, K)), rows_of(comm, whole(K, N)).detach()
    advice = ["gradient", "detach()", "uncut_mpi.matmul"]
    expect(comm, um.ParamError, advice, lambda: session.distribute(given, Layout.rows()))
    expect(comm, um.ParamError, advice, lambda: session.register(given, root=0))
    for other in (None, plain.cpu().numpy()):
        expect(
            comm, um.ParamError, ["b_local is ", "gradient", "x.detach()"], lambda b=other: um.matmul(comm, given, b)
        )
    batch = mine_of(comm, whole(4, M, K))
    one = whole(1, K, N).detach() if comm.rank == 0 else whole(0, K, N).detach()
    expect(comm, um.ParamError, ["4 and 1 products", "two dimensions"], lambda: um.matmul(comm, batch, one))
