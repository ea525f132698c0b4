"""What Python and the core both declare is the same in both: records, codes, element types, limits."""

from __future__ import annotations

import numpy as np
import pytest

from uncut_mpi import _native
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.form import KINDS, OP_BITS, Form
from uncut_mpi.model.locations import ANY_DEVICE, ENDED_DTYPE, NOBODY, Space
from uncut_mpi.model.placement import Matrix
from uncut_mpi.planning import lower
from uncut_mpi.planning.blocking import HALVINGS
from uncut_mpi.planning.buffers import ALIGNMENT, BUFFER_ALIGNMENT, COLUMN_ALIGNMENT

CONTRACT = _native.contract()
RECORDS = {
    "locations": ENDED_DTYPE,
    "operations": lower.OPERATION_DTYPE,
    "bound_operands": lower.BOUND_OPERAND_DTYPE,
}
ENUMERATIONS = Matrix, Space, lower.Code


def test_nothing_of_the_contract_is_left_out() -> None:
    taken = {"tasks", "operands", "regions", "buffers", "lanes", "pieces"}
    assert set(CONTRACT["records"]) == set(RECORDS) | taken
    assert set(CONTRACT["enumerations"]) == {one.__name__ for one in ENUMERATIONS}


@pytest.mark.parametrize("name", RECORDS)
def test_records_have_the_same_fields_at_the_same_places(name: str) -> None:
    own, of_core = RECORDS[name], np.dtype(CONTRACT["records"][name])
    assert own.names == of_core.names
    for field in own.names:
        (mine, at), (theirs, there) = own.fields[field], of_core.fields[field]
        assert (mine.itemsize, at) == (theirs.itemsize, there)


@pytest.mark.parametrize("one", ENUMERATIONS)
def test_codes_have_the_same_values(one: type) -> None:
    assert CONTRACT["enumerations"][one.__name__] == {member.name: int(member) for member in one}


def test_element_types_have_the_same_codes_sizes_and_accumulators() -> None:
    assert CONTRACT["types"] == [(one.name, one.itemsize, one.accumulator.name) for one in DType]


def test_limits_and_numbers_of_ends_are_the_same() -> None:
    assert CONTRACT["limits"] == {
        **{name: CONTRACT["limits"][name] for name in ("max_summands", "max_lanes", "no_source")},
        "alignment_bytes": ALIGNMENT,
        "buffer_alignment": BUFFER_ALIGNMENT,
        "column_alignment": COLUMN_ALIGNMENT,
        "halvings": HALVINGS,
        "any_device": ANY_DEVICE,
        "nobody": NOBODY,
        "op_bits": OP_BITS,
        "forms": (8, 16, 32),
    }
    assert [Form(kind, "lower").code // 32 for kind in KINDS] == [1, 2, 3, 4]  # FormKind
    assert Form("inverse", "upper", unit=True).code == 4 * 32 + 8 + 16
