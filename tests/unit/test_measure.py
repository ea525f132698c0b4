"""What a first measurement makes of rates that hardly differ."""

from __future__ import annotations

import numpy as np
import pytest

from uncut_mpi.model.evened import evened


def test_devices_of_one_model_that_hardly_differ_are_equal():
    assert evened(np.array([57.0, 60.0, 53.0, 58.0]), ["H200"] * 4) == pytest.approx([57.5] * 4)


def test_a_slow_device_stays_slow_and_other_models_count_apart():
    rates = np.array([60.0, 30.0, 58.0, 6.0, 7.0, 6.6])
    models = ["H200"] * 3 + ["V100"] * 3
    assert evened(rates, models) == pytest.approx([59.0, 30.0, 59.0, 6.6, 6.6, 6.6])
    assert rates[0] == 60.0  # what was measured is kept


def test_the_best_that_one_of_them_reaches_all_can_reach():
    assert evened(np.array([57.0, 60.0, 20.0]), ["H200"] * 3, np.max) == pytest.approx([60.0, 60.0, 20.0])


def test_one_device_is_itself():
    assert evened(np.array([3.5]), ["any"]).tolist() == [3.5]
