"""
Gradients that PyTorch records of products of rows: each is two products of the same kind.

Every rank has some rows of A and of B, or some matrices of both. A product is of one of three ways, and the gradients
of each are of the others, so that gradients of gradients need nothing else.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from uncut_mpi.errors import ParamError
from uncut_mpi.model.arguments import type_text
from uncut_mpi.model.layout import Layout
from uncut_mpi.model.problem import Trans

Way: TypeAlias = tuple[Trans, Trans]
"""op of A, and of B."""

PLAIN: Final[Way] = ("N", "N")
_AGAINST: Final[Way] = ("N", "C")
_ACROSS: Final[Way] = ("C", "N")
_GRADIENTS: Final = {
    PLAIN: (("g", "b", _AGAINST), ("a", "g", _ACROSS)),
    _AGAINST: (("g", "b", PLAIN), ("g", "a", _ACROSS)),
    _ACROSS: (("b", "g", _AGAINST), ("a", "g", PLAIN)),
}
"""Of A and of B: which two of A, B and the gradient of C are multiplied, and in what way."""

Multiply: TypeAlias = Callable[[Any, Any, Way, Layout | None], tuple[Any, list[Layout]]]
"""Multiplies what each rank has of A and B; returns that of C, dealt by a layout, and those of A and B. Collective."""


def recorded_of(a: Any, b: Any) -> str:
    """
    Return of which of two operands PyTorch records gradients in this thread now, as all ranks are told. Local.

    Raise ParamError if one of them is no tensor.
    """
    torch = sys.modules.get("torch")
    given = {"a_local": a, "b_local": b}
    if torch is None or not any(map(_needs_gradient, given.values())) or not torch.is_grad_enabled():
        return "none"
    for name, one in given.items():
        if not isinstance(one, torch.Tensor):
            raise ParamError(
                f"{name} is {'None' if one is None else type_text(one)} beside a tensor that requires a gradient: pass "
                "tensors (without rows x[:0]), or x.detach()"
            )
    return " and ".join(name for name, one in given.items() if _needs_gradient(one))


def without_gradient(given: Any) -> Any:
    """Return the same tensor, of which nothing is recorded; anything else as it is."""
    return given.detach() if _needs_gradient(given) else given


def _needs_gradient(given: Any) -> bool:
    return getattr(given, "requires_grad", False) is True


def recorded_product(multiply: Multiply, a: Any, b: Any) -> Any:
    """
    Return this rank's part of A B, a tensor whose gradient leads to those of A and B. Collective.

    Raise ParamError if one of two batches has a single matrix, for all of the other.
    """
    product = functools.partial(_function().apply, multiply)
    if (a.ndim, b.ndim) == (3, 2):  # as one product of more rows
        return product(PLAIN, None, a.flatten(0, 1), b).unflatten(0, a.shape[:2])
    if (a.ndim, b.ndim) == (2, 3):  # likewise, transposed
        return product(_AGAINST, None, b.mT.flatten(0, 1), a.conj()).unflatten(0, b.mT.shape[:2]).mT
    return product(PLAIN, None, a, b)


@functools.cache
def _function() -> Any:
    """Return PyTorch's view of a product; who has tensors has loaded it."""
    torch: Any = sys.modules["torch"]

    class RecordedProduct(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, multiply: Multiply, way: Way, layout: Layout | None, a: Any, b: Any) -> Any:
            ctx.multiply, ctx.way = multiply, way
            ctx.save_for_backward(a, b)
            made, ctx.layouts = multiply(_plain(a), _plain(b), way, layout)
            counts = [sum(one.row_counts) for one in ctx.layouts]
            if a.ndim == 3 and counts[0] != counts[1]:
                raise ParamError(
                    f"A and B have {counts[0]} and {counts[1]} products, and one requires a gradient: pass as many, or "
                    "the single matrix as one of two dimensions"
                )
            return made

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            given = dict(zip("abg", (*ctx.saved_tensors, gradient), strict=True))
            found = [None, None]
            for at, (first, second, way) in enumerate(_GRADIENTS[ctx.way]):
                if ctx.needs_input_grad[3 + at]:
                    layout = ctx.layouts[at] if way == _ACROSS else None
                    found[at] = RecordedProduct.apply(ctx.multiply, way, layout, given[first], given[second])
            return None, None, None, *found

    return RecordedProduct


def _plain(tensor: Any) -> Any:
    """Return the numbers of a tensor in memory that a product can use."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()
