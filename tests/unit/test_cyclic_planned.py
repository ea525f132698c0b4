"""Plans of block-cyclic matrices beside those of blocks."""

from __future__ import annotations

import pytest

from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.machine_files import load_machine
from uncut_mpi.model.places import Places
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.options import ScheduleOptions
from uncut_mpi.planning.planner import Planned, plan
from uncut_mpi.planning.verify import verify


def planned(word: str, ranks: int, dtype: DType) -> Planned:
    problem = GemmProblem(8192, 8192, 8192, dtype)
    placement = Places.parse(f"{word},{word},{word}").bound(problem, ranks)
    return plan(problem, placement, ranks, load_machine("h200-4x").subset(range(ranks)), ScheduleOptions())


@pytest.mark.parametrize(
    ("ranks", "along", "dtype"), [(2, "cols", DType.bf16), (4, "cols", DType.f64), (4, "rows", DType.bf16)]
)
def test_cyclic_blocks_are_expected_to_take_little_longer_than_one_block_each(
    ranks: int, along: str, dtype: DType
) -> None:
    """Runs of a matrix are handed on together, so that the copies of a lane are one (`csrc/packing.hpp`)."""
    usual = planned(along, ranks, dtype)
    grid = f"1,{ranks}" if along == "cols" else f"{ranks},1"
    for block in (64, 256):
        made = planned(f"block_cyclic({block},{block};{grid})", ranks, dtype)
        assert made.predicted_s < 1.1 * usual.predicted_s, (block, made.predicted_s, usual.predicted_s)
    verify(made.schedule)
