"""
What has to run once before a plan may be fired, so that nothing is loaded while flags are awaited.

Loading a kernel at its first use may wait for the whole device, and with lanes that wait for peers
that is a deadlock. Of a list with such lanes each distinct GEMM signature, kernel of ours and kind of
copy therefore runs once, on scratch memory, before the opening barrier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from uncut_mpi.model.dtypes import ITEMSIZES, DType
from uncut_mpi.model.epilogue import Epilogue
from uncut_mpi.model.locations import host_index, location_table
from uncut_mpi.planning.lower import BOUND_OPERAND_DTYPE, OPERATION_DTYPE, Code, OperationList
from uncut_mpi.planning.schedule import (
    BUFFER_DTYPE,
    LANE_DTYPE,
    NO_SOURCE,
    Factor,
    LaneKind,
    Matrix,
    Op,
    Role,
)

_ALIGNMENT: Final = 256
_SCRATCH, _HOST_SCRATCH = 0, 1


class Region(NamedTuple):
    """
    What cuBLAS may look at of an operand.

    Attributes
    ----------
    dtype : DType
        Of its elements.
    op : int
        `Op` code.
    spare_rows : int
        Rows of padding behind it, which the executor may add to the product.
    alignment : int
        Address modulo 256.
    rows, cols, ld : int
        As it lies in memory (elements).
    """

    dtype: DType
    op: int
    spare_rows: int
    alignment: int
    rows: int
    cols: int
    ld: int

    @property
    def nbytes(self) -> int:
        """Bytes from the granule that it begins in to its end."""
        return (self.ld * (self.cols - 1) + self.rows + self.spare_rows) * self.dtype.itemsize + self.alignment

    def compact(self) -> Region:
        """Return it with the least leading dimension of the same alignment class, for when memory is short."""
        granule = _ALIGNMENT // self.dtype.itemsize
        return self._replace(ld=min(self.ld, self.rows + (self.ld - self.rows) % granule))


class GemmSignature(NamedTuple):
    """
    All that cuBLAS may look at when it chooses a kernel: C, A and B, and the factor of C.

    Attributes
    ----------
    c, a, b : Region
        The operands.
    factor_c : Factor
        ZERO, ONE, or BETA for a number that is neither: in half types the library has kernels for each of the three
        (cuBLAS 13 on H200).
    activation : int
        Of the epilogue that C is written with, its number.
    place : int
        And how many elements its bias begins behind an address that is aligned; -1 if there is none.
    """

    c: Region
    a: Region
    b: Region
    factor_c: Factor
    activation: int = 0
    place: int = -1

    @property
    def nbytes(self) -> int:
        """Bytes that the largest operand spans; all three may lie over one another."""
        bias = (self.place + self.c.rows) * self.c.dtype.itemsize
        return max(self.c.nbytes, self.a.nbytes, self.b.nbytes, bias)

    def compact(self) -> GemmSignature:
        """Return it with compact operands."""
        return self._replace(c=self.c.compact(), a=self.a.compact(), b=self.b.compact())


def square(size: int, dtype: DType) -> GemmSignature:
    """Return the signature of a size×size×size product that does not read C."""
    operand = Region(dtype, Op.N, 0, 0, size, size, size)
    turned = operand._replace(op=Op.T) if dtype.itemsize == 1 else operand  # without a copy of it
    return GemmSignature(operand._replace(dtype=dtype.accumulator), turned, operand, Factor.ZERO)


def gemm_signatures(program: OperationList, addresses: np.ndarray) -> set[GemmSignature]:
    """Return the distinct signatures of a list's GEMMs; beta may be 0, 1 or another number, so all three are taken."""
    gemms, operands = program.operations[program.operations["code"] == Code.GEMM], program.operands
    first, adds = gemms["first_operand"], gemms["num_operands"] == 4
    columns = [np.where(adds, operands["factor"][np.where(adds, first + 3, first)], Factor.ZERO)]
    for at in (first, first + 1, first + 2):
        of = operands[at]
        columns += [of["dtype"], of["op"], of["spare_rows"], (addresses[of["buffer"]] + of["offset"]) % _ALIGNMENT]
        columns += [of[name] for name in ("rows", "cols", "ld")]
    columns += [np.zeros_like(first), np.full_like(first, -1)]
    if program.epilogue is not None:
        ends, places = operands["op"][first] != Op.N, operands["diagonal"][first]
        columns[-2] = ends * program.epilogue.activation_code
        if bias := program.vectors[1]:
            item = ITEMSIZES[operands["dtype"][first]]
            columns[-1] = np.where(ends, (bias + places * item) % _ALIGNMENT // item, -1)
    found: set[GemmSignature] = set()
    # A batch has many products of few kinds, mostly as the one before.
    table = np.array(columns, np.int64)
    differs = np.append(True, (table[:, 1:] != table[:, :-1]).any(axis=0))[: table.shape[1]]
    for factor, *places, activation, place in np.unique(table[:, differs], axis=1).T.tolist():
        c, a, b = (Region(DType(places[at]), *places[at + 1 : at + 7]) for at in (0, 7, 14))
        if not (c.rows and c.cols and a.rows and a.cols):
            continue
        may_be = (Factor(factor),) if factor in (Factor.ZERO, Factor.ONE) else (Factor.ZERO, Factor.ONE, Factor.BETA)
        of = c, a, b._replace(spare_rows=0)
        found.update(GemmSignature(*of, factor_c, activation, place) for factor_c in may_be)
    return found


class WarmupList:
    """Collects bodies on scratch memory and makes one operation list of them, without flags."""

    def __init__(self, compute_lanes: int) -> None:
        self._num_lanes = max(1, compute_lanes)
        self._operations: list[tuple[int, ...]] = []
        self._operands: list[tuple[int, ...]] = []

    def gemm(self, signature: GemmSignature, lane: int) -> None:
        """Add a product; its three operands overlap, for only the call matters."""
        operands = [(_SCRATCH, dtype, Factor.ONE, *others) for dtype, *others in signature[:3]]
        if signature.factor_c != Factor.ZERO:
            operands.append((_SCRATCH, signature.c.dtype, signature.factor_c, Op.N, *signature.c[2:]))
        self._add(Code.GEMM, operands, lane, max(0, signature.place))

    def part(self, lane: int) -> None:
        """Keep what a lane has so far from being made with what follows: an event is recorded that nobody awaits."""
        self._operations.append((Code.RECORD, 0, 0, lane, len(self._operations), 0, 0, -1, -1))

    def copies(self, dtype: DType, *, host: bool) -> None:
        """Add flat and strided copies within the device and, if wanted, from and to host memory."""
        pairs = [(_SCRATCH, _SCRATCH)] + ([(_SCRATCH, _HOST_SCRATCH), (_HOST_SCRATCH, _SCRATCH)] if host else [])
        for to, source in pairs:
            for cols, ld in ((1, 2), (2, 4)):
                ends = ((to, 0), (source, 512))
                self._add(Code.COPY, [(at, dtype, Factor.ONE, Op.N, 0, offset, 2, cols, ld) for at, offset in ends], 0)

    def program(self, epilogue: Epilogue | None = None, bias: int = 0) -> OperationList:
        """Return the list, of products with an epilogue; buffer 0 is device scratch, buffer 1 host scratch."""
        buffers = np.array(
            [(at, Role.STAGING, Matrix.NONE, DType.f64, 0, 1, 1, 1, 0) for at in (0, host_index(1))],
            BUFFER_DTYPE,
        )
        return OperationList(
            rank=0,
            num_ranks=1,
            operations=np.array(self._operations, OPERATION_DTYPE),
            operands=np.array(self._operands, BOUND_OPERAND_DTYPE),
            lanes=np.array(
                [(0, LaneKind.COMPUTE, NO_SOURCE, lane) for lane in range(self._num_lanes)]
                + [(0, LaneKind.COPY, 0, 0)],
                LANE_DTYPE,
            ),
            buffers=buffers,
            locations=location_table(1),
            num_events=1,
            flag_lanes=np.zeros(0, LANE_DTYPE),
            span=0,
            epilogue=epilogue,
            vectors=(0, bias),
        )

    def _add(self, code: Code, operands: Sequence[tuple[int, ...]], lane: int, place: int = 0) -> None:
        task = len(self._operations)
        self._operations.append((code, 0, len(operands), lane, task, -1, 0, -1, len(self._operands)))
        self._operands += [(*one, 0 if at else place) for at, one in enumerate(operands)]
