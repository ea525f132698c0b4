"""What callers ask of the calls that make matrices, converted once and told in the same words on all ranks. Local."""

from __future__ import annotations

import collections.abc
import dataclasses

import numpy as np

from uncut_mpi.errors import ParamError
from uncut_mpi.model.arguments import shown, type_text, whole_number
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.problem import MOST_BYTES, Order


@dataclasses.dataclass(frozen=True, slots=True)
class NewMatrix:
    """
    A matrix to be made.

    Attributes
    ----------
    shape : tuple of int
        Rows and columns.
    dtype : DType
        Element type.
    order : str
        ``"F"`` or ``"C"``.
    rank : int or None
        Whose device it is to lie on; None for the host.
    """

    shape: tuple[int, int]
    dtype: DType
    order: Order
    rank: int | None = None

    def __str__(self) -> str:
        where = "" if self.rank is None else f", rank={self.rank}"
        return f"shape={self.shape}, dtype={self.dtype.name}, order={self.order!r}{where}"


def new_matrix(shape: object, dtype: object, order: object) -> NewMatrix:
    """
    Return what a caller wants to have made.

    Raises
    ------
    ParamError
        For a shape that is not two whole numbers, an unknown type or order, or more bytes than there are addresses.
    """
    is_list = isinstance(shape, collections.abc.Sequence) and not isinstance(shape, str | bytes | bytearray)
    if not is_list and not (isinstance(shape, np.ndarray) and shape.ndim == 1):
        raise ParamError(f"shape = {shown(shape)} is {type_text(shape)}: pass the numbers of rows and columns")
    extents = list(shape)  # type: ignore[call-overload]
    if len(extents) != 2:
        raise ParamError(f"shape = {shown(shape)} has {len(extents)} extents: a matrix has two, rows and columns")
    rows, cols = (whole_number(f"shape[{i}]", extent) for i, extent in enumerate(extents))
    if rows < 0 or cols < 0:
        raise ParamError(f"shape = {shown(shape)} has a negative extent: pass the numbers of rows and columns")
    if not isinstance(order, str) or order not in ("F", "C"):
        raise ParamError(f"order {shown(order)}: use 'F' (column-major) or 'C' (row-major)")
    kind = DType.parse(dtype)
    if max(rows * cols, rows, cols) * kind.itemsize >= MOST_BYTES:
        raise ParamError(f"shape = {shown(shape)} is more than can be addressed ({MOST_BYTES} bytes): use less")
    return NewMatrix((rows, cols), kind, "F" if order == "F" else "C")


def rank_of(name: str, value: object, size: int) -> int:
    """
    Return a caller's rank of a session of so many.

    Raises
    ------
    ParamError
        If it is no whole number, or there is no such rank.
    """
    rank = whole_number(name, value)
    if not 0 <= rank < size:
        raise ParamError(f"{name} = {shown(value)} is not a rank of this session (0 to {size - 1})")
    return rank
