"""
The proof of `spare_rows`: what a product computes beyond its operands lies in padding that belongs to their buffers.

It speaks of addresses, not of the rule by which lowering gives them: a wrong rule is found too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from uncut_mpi.errors import ScheduleError
from uncut_mpi.model.dtypes import ITEMSIZES
from uncut_mpi.planning.lower import OperationList
from uncut_mpi.planning.schedule import Role


def verify_spare_rows(lists: Sequence[OperationList]) -> None:
    """
    Prove that no operand's spare rows reach a row that holds anything, nor past its buffer.

    Behind each column of a buffer of ours, the last included, stands padding up to its leading dimension; that no
    other buffer is there is `verify_memory`'s to show. A caller's matrix has none: what is there is the caller's.

    Raises
    ------
    ScheduleError
        Naming the rank, the task and the buffer.
    """
    for program in lists:
        operands = program.operands
        buffer = program.buffers[operands["buffer"]]
        # Where the last column ends, and its spare rows, in rows of its buffer.
        start = operands["offset"] // ITEMSIZES[operands["dtype"]] % operands["ld"] + operands["rows"]
        stop = start + operands["spare_rows"]
        padding = (buffer["role"] != Role.USER) & (start >= buffer["rows"]) & (stop <= buffer["ld"])
        wrong = (operands["spare_rows"] > 0) & ~padding
        if wrong.any():
            at = int(np.argmax(wrong))
            first = program.operations["first_operand"]
            tasks = program.operations["task"][(first <= at) & (at < first + program.operations["num_operands"])]
            rows, ld, role = (buffer[name][at] for name in ("rows", "ld", "role"))
            raise ScheduleError(
                f"rank {program.rank}: an operand of task {', '.join(map(str, tasks.tolist()))} has spare rows "
                f"[{start[at]}, {stop[at]}) of buffer {operands['buffer'][at]} ({Role(role).name}), which holds rows "
                f"[0, {rows}) and has leading dimension {ld}: spare rows are padding of a buffer of ours"
            )
