"""What Python and the core both know is the same in both: records, codes, element types, limits."""

from __future__ import annotations

import numpy as np
import pytest

from uncut_mpi import _native
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.locations import ANY_DEVICE, ENDED_DTYPE, NOBODY, Space
from uncut_mpi.planning import lower, schedule
from uncut_mpi.planning.blocking import HALVINGS
from uncut_mpi.planning.buffers import ALIGNMENT, BUFFER_ALIGNMENT, COLUMN_ALIGNMENT

CONTRACT = _native.contract()
RECORDS = {
    "tasks": schedule.TASK_DTYPE,
    "operands": schedule.OPERAND_DTYPE,
    "regions": schedule.REGION_DTYPE,
    "pieces": schedule.PIECE_DTYPE,
    "locations": ENDED_DTYPE,
    "lanes": schedule.LANE_DTYPE,
    "buffers": schedule.BUFFER_DTYPE,
    "operations": lower.OPERATION_DTYPE,
    "bound_operands": lower.BOUND_OPERAND_DTYPE,
}
ENUMERATIONS = (
    schedule.Kind, schedule.Factor, schedule.Op, schedule.Matrix, schedule.Role, Space, schedule.LaneKind, lower.Code
)  # fmt: skip


def test_nothing_of_the_contract_is_left_out() -> None:
    assert set(CONTRACT["records"]) == set(RECORDS)
    assert set(CONTRACT["enumerations"]) == {one.__name__ for one in ENUMERATIONS}


@pytest.mark.parametrize("name", RECORDS)
def test_records_have_the_same_fields_at_the_same_places(name: str) -> None:
    dtype: np.dtype = RECORDS[name]
    fields = tuple((field, dtype.fields[field][1], dtype.fields[field][0].itemsize) for field in dtype.names)
    assert CONTRACT["records"][name] == (dtype.itemsize, fields)


@pytest.mark.parametrize("one", ENUMERATIONS)
def test_codes_have_the_same_values(one: type) -> None:
    assert CONTRACT["enumerations"][one.__name__] == {member.name: int(member) for member in one}


def test_element_types_have_the_same_codes_sizes_and_accumulators() -> None:
    assert CONTRACT["types"] == [(one.name, one.itemsize, one.accumulator.name) for one in DType]


def test_limits_and_numbers_of_ends_are_the_same() -> None:
    assert CONTRACT["limits"] == {
        "max_summands": schedule.MAX_SUMMANDS,
        "max_lanes": schedule.MAX_LANES,
        "alignment_bytes": ALIGNMENT,
        "buffer_alignment": BUFFER_ALIGNMENT,
        "column_alignment": COLUMN_ALIGNMENT,
        "halvings": HALVINGS,
        "no_source": schedule.NO_SOURCE,
        "any_device": ANY_DEVICE,
        "nobody": NOBODY,
    }
