"""What the longest task of a schedule takes: for so long nothing may be seen to end while all is well."""

from __future__ import annotations

import numpy as np

from uncut_mpi.model.machine import Machine
from uncut_mpi.planning.schedule import Kind, Schedule


def longest_task_s(schedule: Schedule, copies: np.ndarray, machine: Machine) -> float:
    """Return about what the longest product or copy takes alone (s); `copies` are those of `Schedule.copies`."""
    rates = 1e9 * machine.bandwidth_gb_per_s[copies[:, 1], copies[:, 2]]
    known = rates > 0.0
    longest = float((copies[known, 3] / rates[known]).max(initial=0.0))
    products = schedule.tasks["first_operand"][schedule.tasks["kind"] == Kind.GEMM]
    if len(products):
        operands = schedule.regions[schedule.operands["region"][products[:, None] + np.arange(3)]]  # C, A and B
        elements = (operands["rows"] * operands["cols"]).astype(np.float64)
        operations = 2.0 * np.sqrt(elements.prod(axis=1)).max()  # mn · mk · kn = (mnk)²
        longest = max(longest, operations / machine.typical_gemm_rate(schedule.problem.arithmetic).min())
    return longest
