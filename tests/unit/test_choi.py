"""The band model: its times against direct counts, its thresholds against the times that they separate."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uncut_mpi.errors import ParamError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.planning.rivals.choi import BandModel, next_power_of_two


@pytest.mark.parametrize(
    ("threshold", "edge"), [(-5.0, 1), (0.0, 1), (0.5, 1), (1.0, 2), (616.3, 1024), (1024.0, 2048), (1023.9, 1024)]
)
def test_the_next_power_of_two_is_above_the_threshold(threshold: float, edge: int) -> None:
    assert next_power_of_two(threshold) == edge


models = st.builds(
    BandModel,
    n=st.integers(1, 10**5),
    num_devices=st.integers(1, 16),
    math_gflop_per_s=st.floats(10, 1e6),
    memory_gb_per_s=st.floats(1, 1e4),
    transfer_gb_per_s=st.floats(0.1, 1e3),
    dtype=st.sampled_from(list(DType)),
)


@given(models, st.integers(1, 10**4))
def test_each_threshold_is_where_its_two_times_meet(model: BandModel, edge: int) -> None:
    def separates(threshold: float, above: float, below: float) -> bool:
        return math.isclose(above, below, rel_tol=1e-9) or (edge > threshold) == (above > below)

    waiting = (model.num_devices - 1) * model.transfer_s(edge)
    assert separates(model.intensity_threshold(), model.math_s(edge), model.memory_s(edge))
    assert separates(model.transfer_threshold(), model.math_s(edge), waiting)
    assert separates(model.memory_bound_transfer_threshold(), model.memory_s(edge), waiting)


@given(models)
def test_the_tile_edge_hides_transfers_behind_products(model: BandModel) -> None:
    edge = model.tile_edge()
    assert edge & (edge - 1) == 0
    assert model.kernel_s(edge) == pytest.approx(model.gemm_s(edge))


def test_times_count_operations_and_bytes() -> None:
    model = BandModel(1000, 4, 10.0, 5.0, 2.0, DType.f64)
    assert model.math_s(100) == pytest.approx(2 * 100 * 100 * 1000 / 10e9)
    assert model.memory_s(100) == pytest.approx(8 * (2 * 100 * 1000 + 100 * 100) / 5e9)
    assert model.transfer_s(100) == pytest.approx(8 * 100 * 1000 / 2e9)
    assert model.gemm_s(100) == model.math_s(100)
    assert model.kernel_s(100) == model.math_s(100)
    assert model.kernel_s(10) == 3 * model.transfer_s(10)
    assert model.task_s(100) == pytest.approx(3 * model.transfer_s(100) + 1000 / 400 * model.kernel_s(100))


@pytest.mark.parametrize("name", ["n", "num_devices", "math_gflop_per_s", "memory_gb_per_s", "transfer_gb_per_s"])
def test_what_is_not_positive_is_refused(name: str) -> None:
    values = {"n": 10, "num_devices": 2, "math_gflop_per_s": 1.0, "memory_gb_per_s": 1.0, "transfer_gb_per_s": 1.0}
    with pytest.raises(ParamError, match=f"{name} = 0"):
        BandModel(**{**values, name: 0})
