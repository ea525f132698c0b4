"""What executors take for granted of an operation list: checked once, for all backends."""

from __future__ import annotations

import numpy as np

from uncut_mpi.errors import ScheduleError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.planning.lower import Code, OperationList
from uncut_mpi.planning.schedule import MAX_LANES, Op, expand_ranges

_REGION = ["buffer", "dtype", "op", "offset", "rows", "cols", "ld"]


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
    operands, turned = program.operands, program.operands["op"] != Op.N
    rows = np.where(turned, operands["cols"], operands["rows"])
    cols = np.where(turned, operands["rows"], operands["cols"])

    def require(bodies: np.ndarray, good: np.ndarray, what: str) -> None:
        if good.all():
            return
        body = bodies[np.argmin(good)]
        shapes = [
            f"{rows[at]}×{cols[at]} {DType(int(operands['dtype'][at])).name}"
            for at in expand_ranges(body["first_operand"][None], body["num_operands"][None])
        ]
        kind = Code(body["code"]).name
        raise ScheduleError(f"task {body['task']}: a {kind} of {', '.join(shapes) or 'nothing'}: {what}")

    bodies = program.operations[program.operations["code"] <= Code.COMBINE]
    first, count = bodies["first_operand"].astype(np.int64), bodies["num_operands"].astype(np.int64)
    require(bodies, count > 0, "it has no operands")
    used, owners = expand_ranges(first, count), np.repeat(np.arange(len(bodies)), count)
    empty = (operands["rows"] == 0) | (operands["cols"] == 0)
    for at in used[(addresses[operands["buffer"][used]] == 0) & ~empty[used]]:
        task = bodies["task"][owners[used == at]][0]
        raise ScheduleError(f"task {task}: buffer {operands['buffer'][at]} has no address on rank {program.rank}")

    is_copy, is_product = bodies["code"] == Code.COPY, bodies["code"] == Code.GEMM
    require(bodies, ~is_copy | (count == 2), "it has one destination and one source")
    require(bodies, ~is_product | (count == 3) | (count == 4), "it has C, A, B and, if it accumulates, C again")
    alike = ~is_product[owners]
    same = (rows[used] == rows[first[owners]]) & (cols[used] == cols[first[owners]])
    require(bodies[owners], same | ~alike, "its regions differ in shape or type")
    to = first[is_copy]
    require(bodies[is_copy], operands["dtype"][to] == operands["dtype"][to + 1], "its regions differ in shape or type")
    c, a, b = (first[is_product] + at for at in range(3))
    fits = (rows[a] == rows[c]) & (cols[b] == cols[c]) & (cols[a] == rows[b])
    require(bodies[is_product], fits, "the shapes of its operands do not fit")
    adding = bodies[is_product & (count == 4)]
    c = adding["first_operand"].astype(np.int64)
    same = operands[_REGION][c] == operands[_REGION][c + 3]
    require(adding, same, "it accumulates onto another region than it writes")
