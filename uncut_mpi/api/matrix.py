"""Matrices of a session: what every rank knows of them, and what their owner alone holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from uncut_mpi.errors import ParamError
from uncut_mpi.mappings import Piece
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.locations import Location
from uncut_mpi.model.problem import Order, StoredMatrix

READ_ONLY: Final = "is a read-only array, or lies in a file that a device may only read: pass a writeable one"


@dataclasses.dataclass(frozen=True, slots=True)
class MatrixInfo:
    """
    What every rank of the session knows of a matrix.

    Attributes
    ----------
    number : int
        The session's number for it, the same on all ranks.
    stored : StoredMatrix
        Shape, order and leading dimension (elements).
    dtype : DType
        Element type.
    location : Location
        Where it lives.
    pieces : tuple of Piece
        The bytes from its first element to its last, as all ranks know them. Shared host memory is one piece.
    handle : bytes or None
        For device memory: the exported allocation it lies in; None if that cannot be exported.
    offset_bytes : int
        From that allocation's base to element (0, 0).
    obstacle : str
        Why its owner alone can use it: device memory cannot be exported, or private host memory not be page-locked.
        Empty if others can.
    writeable : bool
        Whether it may be C.
    """

    number: int
    stored: StoredMatrix
    dtype: DType
    location: Location
    pieces: tuple[Piece, ...]
    handle: bytes | None = None
    offset_bytes: int = 0
    obstacle: str = ""
    writeable: bool = True


class Matrix:
    """
    A matrix that a session can multiply; made by `Session.empty_host`, `empty_device` and `register`.

    numpy takes it for its array where this rank has it in host memory: ``numpy.asarray(matrix)`` is that array, and
    ``numpy.allclose(matrix, x)`` compares it. Elements, parts and operators are the array's: ``matrix.array[2:, :3]``,
    which `Session.register` makes a matrix again, without a copy.

    Attributes
    ----------
    array : numpy.ndarray, cupy.ndarray or None
        The matrix as this rank sees it: the shared array for host matrices that all ranks read,
        the owner's array for the others (None on every other rank).
    """

    def __init__(self, info: MatrixInfo, *, array: Any, address: int, home: object = None) -> None:
        self.info = info
        self.array = array
        self._address = address
        self.closed, self.home = False, home  # that of its session's store, until it is released

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.info.stored.rows, self.info.stored.cols

    @property
    def dtype(self) -> DType:
        """Element type."""
        return self.info.dtype

    @property
    def order(self) -> Order:
        """``"F"`` or ``"C"``."""
        return self.info.stored.order

    @property
    def location(self) -> Location:
        """Where the matrix lives."""
        return self.info.location

    @property
    def address(self) -> int:
        """Address of element (0, 0) in this process, 0 where this rank cannot reach it directly."""
        return self._address

    def __repr__(self) -> str:
        rows, cols = self.shape
        return f"<Matrix {self.info.number}: {rows}×{cols} {self.dtype.name} {self.order}-order at {self.location}>"

    # -- what numpy and operators make of it -------------------------------------------------

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """
        Return this rank's array, for numpy.

        Raises
        ------
        ParamError
            If the matrix was released, or this rank does not have it in host memory; with the mend.
        """
        if self.closed:
            raise ParamError(f"{self} was released, or its session was closed: numpy can have no array of it")
        array = self.array
        if not isinstance(array, np.ndarray):
            if array is None:
                where = "host memory" if self.location.space == "host" else "device memory"
                found = f"lies in the {where} of rank {self.location.rank}, not of this one"
            else:
                found = "lies on a GPU: its cupy array is .array"
            raise ParamError(f"{self} {found}; session.download(matrix), on all ranks, is one that numpy can read")
        if dtype is None or array.dtype == dtype:
            return array.copy() if copy else array
        if copy is False:
            raise ValueError(f"{self} is {array.dtype} and cannot become {np.dtype(dtype)} without a copy")
        return array.astype(dtype)

    def _no_elements(self, *key: object) -> Any:
        raise TypeError(
            f"{self} has no elements of its own: its array is .array, and session.register(matrix.array[rows, cols], "
            "root=rank) makes a part of it a matrix"
        )

    __getitem__ = __setitem__ = __delitem__ = __iter__ = __contains__ = _no_elements

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self} belongs to its session and process, and cannot be copied or sent: use its .array, or "
            "session.download(matrix), on all ranks, for one that all can read"
        )

    def __matmul__(self, other: object) -> Any:
        return self._no_operator("@", other, "use session.gemm(a, b)")

    def _no_operator(self, symbol: str, other: object, mend: str = "use numpy.asarray(matrix) or .array") -> Any:
        """Leave an operator to an array on its other side, which knows what to do; else raise TypeError."""
        if hasattr(other, "__array_ufunc__"):
            return NotImplemented
        raise TypeError(f"a Matrix has no operator {symbol}: {mend}")

    if not TYPE_CHECKING:  # who checks types is to see what there is

        def __getattr__(self, name: str) -> Any:
            mend = ": pass trans_a or trans_b to gemm, or use .array.T" if name == "T" else ""
            raise AttributeError(f"a Matrix has no attribute {name!r}{mend}", name=name, obj=self)


def _without(symbol: str) -> Callable[..., Any]:
    def operate(self: Matrix, other: object = None) -> Any:
        return self._no_operator(symbol, other)

    return operate


for _name, _symbol in (
    *(("add", "+"), ("sub", "-"), ("mul", "*"), ("truediv", "/"), ("floordiv", "//"), ("mod", "%"), ("pow", "**")),
    *(("radd", "+"), ("rsub", "-"), ("rmul", "*"), ("rtruediv", "/"), ("neg", "-"), ("abs", "abs")),
):
    setattr(Matrix, f"__{_name}__", _without(_symbol))


def layout_of(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> StoredMatrix:
    """
    Return how an array with these strides (bytes) is stored.

    Raises
    ------
    ParamError
        If it is not two-dimensional, or neither its rows nor its columns are contiguous.
    """
    if len(shape) != 2:
        raise ParamError(f"an array of {len(shape)} dimensions was given; a matrix has two (reshape it first)")
    rows, cols = shape
    row_stride, col_stride = strides
    if rows == 0 or cols == 0:
        return StoredMatrix(rows, cols, "F")
    # A stride along an extent of 1 is never used, so it says nothing about the order.
    if (rows == 1 or row_stride == itemsize) and (
        cols == 1 or (col_stride % itemsize == 0 and col_stride >= rows * itemsize)
    ):
        return StoredMatrix(rows, cols, "F", col_stride // itemsize if cols > 1 else rows)
    if (cols == 1 or col_stride == itemsize) and (
        rows == 1 or (row_stride % itemsize == 0 and row_stride >= cols * itemsize)
    ):
        return StoredMatrix(rows, cols, "C", row_stride // itemsize if rows > 1 else cols)
    raise ParamError(
        f"a {rows}×{cols} array with strides {row_stride} and {col_stride} bytes is contiguous along neither "
        "rows nor columns: pass a copy (numpy.ascontiguousarray)"
    )


def overlap(x: MatrixInfo, written: MatrixInfo) -> bool:
    """
    Return whether writing a matrix changes an element of another.

    Exact for matrices of one leading dimension and type; otherwise true whenever they share a byte
    between their first and last ones.
    """
    if not (x.stored.rows and x.stored.cols and written.stored.rows and written.stored.cols):
        return False
    return any(
        one.memory == other.memory and other.written and _meet(x, one, written, other)
        for one in x.pieces
        for other in written.pieces
    )


def _meet(x: MatrixInfo, piece: Piece, y: MatrixInfo, other: Piece) -> bool:
    """Return whether two matrices share an element's bytes, each as it lies around a piece of it in one memory."""
    if piece.start + piece.nbytes <= other.start or other.start + other.nbytes <= piece.start:
        return False
    item = x.dtype.itemsize
    same = x.stored.ld == y.stored.ld and x.dtype is y.dtype
    distance = (other.start - other.offset) - (piece.start - piece.offset)
    if not same or distance % item:
        return True
    # Rectangles of one array of leading dimension ld, both read column-major. y starts `col` columns
    # and `row` rows after x; a negative row offset appears as ld − |row| in the column before.
    ld = x.stored.ld
    (x_rows, x_cols), (y_rows, y_cols) = x.stored.column_major_shape, y.stored.column_major_shape
    col, row = divmod(distance // item, ld)
    candidates = ((col, row), (col + 1, row - ld))
    return any(-y_rows < r < x_rows and -y_cols < c < x_cols for c, r in candidates)


def extent_bytes(stored: StoredMatrix, dtype: DType) -> int:
    """Return the bytes from a matrix's first element to its last; 0 if it has none."""
    rows, cols = stored.column_major_shape
    return ((cols - 1) * stored.ld + rows) * dtype.itemsize if rows and cols else 0


def host_view(address_array: np.ndarray, info: MatrixInfo) -> np.ndarray:
    """Return the strided matrix of `info` over a flat array that starts at its element (0, 0)."""
    item = info.dtype.itemsize
    stored = info.stored
    strides = (item, stored.ld * item) if stored.order == "F" else (stored.ld * item, item)
    return np.lib.stride_tricks.as_strided(address_array, (stored.rows, stored.cols), strides)
