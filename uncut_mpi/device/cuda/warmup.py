"""
What has to run once before a plan may be fired, so that nothing is loaded while flags are awaited.

Loading a kernel at its first use may wait for the whole device, and with lanes that wait for peers
that is a deadlock. Each distinct GEMM signature, kernel of ours and kind of copy therefore runs
once, on scratch memory, before the opening barrier.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from uncut_mpi.model.dtypes import DType
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


@dataclasses.dataclass(frozen=True, slots=True)
class GemmSignature:
    """
    All that cuBLAS may look at when it chooses a kernel.

    Attributes
    ----------
    m, n, k : int
        Rows and columns of C, and the shared extent (elements).
    op_a, op_b : int
        `Op` codes.
    lds : tuple of int
        Leading dimensions of C, A and B (elements).
    dtype, dtype_c : DType
        Type of A and B, and of C.
    alignments : tuple of int
        Addresses of C, A and B modulo 256.
    accumulates : bool
        Whether C is read.
    rooms : tuple of int
        Rows of padding behind C and A, which the executor may add to the product.
    """

    m: int
    n: int
    k: int
    op_a: int
    op_b: int
    lds: tuple[int, int, int]
    dtype: DType
    dtype_c: DType
    alignments: tuple[int, int, int]
    accumulates: bool
    rooms: tuple[int, int] = (0, 0)

    def operands(self, lds: tuple[int, int, int]) -> Iterator[tuple[int, int, int, DType, int, int, int]]:
        """Yield (rows, cols, ld, dtype, op, alignment, room) of C, A and B with the leading dimensions given."""
        shape_a = (self.m, self.k) if self.op_a == Op.N else (self.k, self.m)
        shape_b = (self.k, self.n) if self.op_b == Op.N else (self.n, self.k)
        yield self.m, self.n, lds[0], self.dtype_c, Op.N, self.alignments[0], self.rooms[0]
        yield *shape_a, lds[1], self.dtype, self.op_a, self.alignments[1], self.rooms[1]
        yield *shape_b, lds[2], self.dtype, self.op_b, self.alignments[2], 0

    def scratch_bytes(self, lds: tuple[int, int, int]) -> int:
        """Return the bytes the largest operand spans; all three may lie over one another."""
        return max(
            (ld * (cols - 1) + rows + room) * dtype.itemsize + alignment
            for rows, cols, ld, dtype, _, alignment, room in self.operands(lds)
        )

    def compact_lds(self) -> tuple[int, int, int]:
        """Return the least leading dimensions of the same alignment class, for when memory is short."""
        least = []
        for rows, _, ld, dtype, *_ in self.operands(self.lds):
            granule = _ALIGNMENT // dtype.itemsize
            least.append(min(ld, rows + (ld - rows) % granule))
        return (least[0], least[1], least[2])


def square(size: int, dtype: DType) -> GemmSignature:
    """Return the signature of a size×size×size product that does not read C."""
    return GemmSignature(
        m=size,
        n=size,
        k=size,
        op_a=Op.N,
        op_b=Op.N,
        lds=(size, size, size),
        dtype=dtype,
        dtype_c=dtype.accumulator,
        alignments=(0, 0, 0),
        accumulates=False,
    )


def gemm_signatures(program: OperationList, addresses: np.ndarray) -> set[GemmSignature]:
    """Return the distinct signatures of a list's GEMMs; beta may be zero or not, so both are taken."""
    found = set()
    at = program.operations["first_operand"][program.operations["code"] == Code.GEMM]
    counts = program.operations["num_operands"][program.operations["code"] == Code.GEMM]
    for first, count in zip(at.tolist(), counts.tolist(), strict=True):
        c, a, b = (program.operands[first + i] for i in range(3))
        k = int(a["cols"] if a["op"] == Op.N else a["rows"])
        if not (c["rows"] and c["cols"] and k):
            continue
        factor = program.operands[first + 3]["factor"] if count == 4 else Factor.ZERO
        reads = {Factor.ZERO: (False,), Factor.ONE: (True,)}.get(Factor(factor), (False, True))
        for accumulates in reads:
            found.add(
                GemmSignature(
                    m=int(c["rows"]),
                    n=int(c["cols"]),
                    k=k,
                    op_a=int(a["op"]),
                    op_b=int(b["op"]),
                    lds=(int(c["ld"]), int(a["ld"]), int(b["ld"])),
                    dtype=DType(int(a["dtype"])),
                    dtype_c=DType(int(c["dtype"])),
                    alignments=tuple(  # type: ignore[arg-type]
                        int((int(addresses[x["buffer"]]) + int(x["offset"])) % _ALIGNMENT) for x in (c, a, b)
                    ),
                    accumulates=accumulates,
                    rooms=(int(c["room"]), int(a["room"])),
                )
            )
    return found


class WarmupList:
    """Collects bodies on scratch memory and makes one operation list of them, with no flags and no events."""

    def __init__(self, compute_lanes: int) -> None:
        self._num_lanes = max(1, compute_lanes)
        self._operations: list[tuple[int, ...]] = []
        self._operands: list[tuple[int, ...]] = []

    def gemm(self, signature: GemmSignature, lds: tuple[int, int, int], lane: int) -> None:
        """Add a product; its three operands overlap, for only the call matters."""
        operands = [
            (_SCRATCH, dtype, Factor.ONE, op, room, alignment, rows, cols, ld)
            for rows, cols, ld, dtype, op, alignment, room in signature.operands(lds)
        ]
        if signature.accumulates:
            operands.append(operands[0])
        self._add(Code.GEMM, operands, lane)

    def copies(self, dtype: DType, *, host: bool) -> None:
        """Add flat and strided copies within the device and, if wanted, from and to host memory."""
        pairs = [(_SCRATCH, _SCRATCH)] + ([(_SCRATCH, _HOST_SCRATCH), (_HOST_SCRATCH, _SCRATCH)] if host else [])
        for to, source in pairs:
            for cols, ld in ((1, 2), (2, 4)):
                ends = ((to, 0), (source, 512))
                self._add(Code.COPY, [(at, dtype, Factor.ONE, Op.N, 0, offset, 2, cols, ld) for at, offset in ends], 0)

    def program(self) -> OperationList:
        """Return the list; buffer 0 is device scratch, buffer 1 host scratch."""
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
            num_events=0,
            flag_lanes=np.zeros(0, LANE_DTYPE),
            span=0,
        )

    def __len__(self) -> int:
        return len(self._operations)

    def _add(self, code: Code, operands: Sequence[tuple[int, ...]], lane: int) -> None:
        task = len(self._operations)
        self._operations.append((code, 0, len(operands), lane, task, -1, 0, -1, len(self._operands)))
        self._operands += operands
