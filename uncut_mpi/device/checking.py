"""What executors take for granted of an operation list: checked once, for all backends."""

from __future__ import annotations

import numpy as np

from uncut_mpi.errors import ScheduleError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.form import OP_BITS
from uncut_mpi.planning.lower import Code, OperationList
from uncut_mpi.planning.schedule import MAX_LANES, Op, expand_ranges

_REGION = ["buffer", "dtype", "offset", "rows", "cols", "ld"]


def check_program(program: OperationList, addresses: np.ndarray) -> None:
    """
    Check that bodies have the operands of their kind, in shapes that fit, all of them at addresses.

    Raises
    ------
    ScheduleError
        Naming the task; or if there are more lanes than an executor has.
    """
    if len(program.lanes) > MAX_LANES:
        raise ScheduleError(
            f"rank {program.rank} would need {len(program.lanes)} lanes, {MAX_LANES} are possible: "
            "use fewer compute lanes"
        )
    bodies = program.operations[program.operations["code"] <= Code.COMBINE]
    first, count = bodies["first_operand"].astype(np.int64), bodies["num_operands"].astype(np.int64)
    is_copy, is_product = bodies["code"] == Code.COPY, bodies["code"] == Code.GEMM
    whose = np.repeat(np.arange(len(bodies)), count)
    # Every operand as it is used, body after body, and with it the one that its body writes.
    used = program.operands[expand_ranges(first, count)]
    turned = (used["op"] & OP_BITS == Op.T) | (used["op"] & OP_BITS == Op.C)
    rows, cols = (np.where(turned, used[one], used[other]) for one, other in (("cols", "rows"), ("rows", "cols")))
    start = np.cumsum(count) - count

    def require(good: np.ndarray, of: np.ndarray, what: str) -> None:
        if not good.all():
            body = of[np.argmin(good)]
            shapes = (
                f"{rows[at]}×{cols[at]} {DType(int(used['dtype'][at])).name}"
                for at in range(start[body], start[body] + count[body])
            )
            kind = Code(bodies["code"][body]).name
            raise ScheduleError(f"task {bodies['task'][body]}: {what} ({kind}: {', '.join(shapes)})")

    halves = program.operations[program.operations["code"] >= Code.SEND]
    ends = program.operands[halves["first_operand"]]
    if ((addresses[ends["buffer"]] == 0) & (ends["rows"] > 0) & (ends["cols"] > 0)).any():
        raise ScheduleError(f"a buffer that is sent or received has no address on rank {program.rank}")
    epilogue = program.epilogue
    has_epilogue = np.isin(program.operands["op"], (Op.EPILOGUE_ROWS, Op.EPILOGUE_COLS)).any()
    if has_epilogue and (
        epilogue is None or (epilogue.scale, epilogue.bias) != (program.vectors[0] != 0, program.vectors[1] != 0)
    ):
        raise ScheduleError(f"a vector of the epilogue has no address on rank {program.rank}, or is not asked for")
    each, products = np.arange(len(bodies)), np.flatnonzero(is_product)
    require(count > 0, each, "it has no operands")
    require(~is_copy | (count == 2), each, "a COPY has one destination and one source")
    require(~is_product | (count == 3) | (count == 4), each, "a GEMM has C, A, B and, if it accumulates, C again")
    lost = (addresses[used["buffer"]] == 0) & (rows > 0) & (cols > 0)
    if lost.any():
        require(~lost, whose, f"buffer {used['buffer'][np.argmax(lost)]} has no address on rank {program.rank}")
    written = start[whose]
    alike = (rows == rows[written]) & (cols == cols[written])
    alike &= ~is_copy[whose] | (used["dtype"] == used["dtype"][written])
    require(alike | is_product[whose], whose, "its regions differ in shape or type")
    c, a, b = (start[products] + at for at in range(3))
    fits = (rows[a] == rows[c]) & (cols[b] == cols[c]) & (cols[a] == rows[b])
    require(fits, products, "the shapes of its operands do not fit")
    adding = np.flatnonzero(count == 4)[is_product[count == 4]]
    same = used[_REGION][start[adding]] == used[_REGION][start[adding] + 3]
    same &= used["op"][start[adding] + 3] == Op.N
    require(same, adding, "it accumulates onto another region than it writes")
