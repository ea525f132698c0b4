"""What types follow from the arguments of calls: mypy reads this, nobody runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from uncut_mpi import Batch, CallResult, GemmPlan, Handle, Layout, Matrix, Session, matmul

if TYPE_CHECKING:
    from typing_extensions import assert_type


def matrices(s: Session, array: Any) -> None:
    one, several, rows = s.empty_host((4, 4)), s.empty_host((3, 4, 4)), Layout.rows()
    assert_type((one, several), tuple[Matrix, Batch])
    assert_type((s.empty_host(one.shape), s.empty_host(several.shape), s.empty_host([4, 4])), tuple[Matrix, Batch, Any])
    assert_type((s.empty_device((4, 4), rank=0), s.empty_device((3, 4, 4), rank=0)), tuple[Matrix, Batch])
    assert_type((s.empty((4, 4), "f32", rows), s.empty((3, 4, 4), "f32", rows)), tuple[Matrix, Batch])
    assert_type(s.distribute(array, rows), Any)
    assert_type(s.distribute(array, rows, shape=(4, 4)), Matrix)
    assert_type(s.distribute(array, rows, shape=(3, 4, 4)), Batch)
    assert_type(s.register(array, root=0), Any)


def products(s: Session, m: Matrix, b: Batch, either: bool) -> None:
    assert_type(
        (s.gemm(m, m), m @ m, s.matmul(m, m), s.gemm(m, m, m, alpha=2.0)), tuple[Matrix, Matrix, Matrix, Matrix]
    )
    assert_type((s.gemm(b, b), s.gemm(b, m), s.gemm(m, b, beta=1.0), m @ b), tuple[Batch, Batch, Batch, Batch])
    assert_type(s.gemm(m, m, wait=False).wait(), Matrix)
    assert_type((s.gemm(b, m, wait=False), s.gemm(m, b, wait=False)), tuple[Handle[Batch], Handle[Batch]])
    assert_type(s.gemm(m, m, wait=either), Any)
    assert_type((s.download(m), s.redistribute(b, None, out=b)), tuple[Matrix, Batch])
    assert_type((s.gemm_batch([m], m, [m]), s.gemm_batch(b, b, b, wait=False)), tuple[list[Matrix], Handle[Batch]])
    s.gemm(m, np.zeros((4, 4)))  # type: ignore[call-overload]
    s.gemm(m, m, b)  # type: ignore[type-var]
    s.gemm(m, m, alfa=2.0)  # type: ignore[call-overload]


def others(plan: GemmPlan, comm: Any, array: Any) -> None:
    numbers = np.zeros((4, 4))
    assert_type((plan.execute(2.0, a=array), plan.execute(wait=False)), tuple[CallResult, Handle[CallResult]])
    plan.execute(d=3)  # type: ignore[call-overload]
    assert_type((matmul(comm, numbers, numbers), matmul(comm, array, None)), tuple[np.ndarray, Any])
