"""One product without a session of the caller's own."""

from __future__ import annotations

from typing import Any

from uncut_mpi.api.exclusive import public_call
from uncut_mpi.api.session import Session
from uncut_mpi.model.layout import Layout


@public_call
def matmul(comm: Any, a_local: Any, b_local: Any) -> Any:
    """
    Return this rank's rows of A B, where each rank has some rows of A and of B. Collective.

    It opens a session and closes it again, so nothing is left and nothing is kept. Each call plans anew, about 0.1 s in
    all on two cores without a GPU. For more than one product open a `Session`, which is as short (`Session.matmul`).

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        The ranks, as of `Session`.
    a_local, b_local : array or None
        This rank's rows of A and of B, from rank 0 on, as of `Session.distribute`; None where it has none.

    Returns
    -------
    numpy.ndarray, cupy.ndarray or torch.Tensor
        As many rows as `a_local` has, in memory of the same kind; a tensor where `a_local` or `b_local` is one.

    Raises
    ------
    ParamError, RankMismatchError, UncutError
        As `Session`, `Session.distribute` and `Session.gemm`.
    """
    with Session(comm) as session:
        a, b = (session.distribute(local, Layout.rows()) for local in (a_local, b_local))
        return session.matmul(a, b).local
