"""NaN and infinity in inputs are counted and placed, however the matrix lies and is shared."""

from __future__ import annotations

import numpy as np
import pytest

from uncut_mpi.command.nonfinite import NonFinite, find, join
from uncut_mpi.model import lines as shares
from uncut_mpi.model.dtypes import DType


@pytest.mark.parametrize("dtype", list(DType), ids=lambda one: one.name)
@pytest.mark.parametrize("order", ["C", "F"])
def test_all_are_counted_and_the_first_is_found(monkeypatch, dtype, order):
    monkeypatch.setattr(shares, "_BLOCK_BYTES", 64)
    count = 17 if order == "F" else 23
    for ranks in 1, 3, 7:
        values = np.ones((23, 17), dtype.numpy, order=order)
        for wanted in None, NonFinite("A", "A.npy", 2, 2, (7, 15)):
            parts = (find("A", "A.npy", values, order, shares.lines_of(count, rank, ranks)) for rank in range(ranks))
            assert join(list(parts)) == wanted
            values[20, 2], values[7, 16], values[7, 15], values[22, 0] = np.nan, np.inf, -np.inf, np.nan


def test_it_is_said_plainly():
    for nan, infinite, said in (
        (1, 0, "1 NaN element,"),
        (0, 1, "1 infinite element,"),
        (2, 3, "2 NaN and 3 infinite e"),
    ):
        assert f"holds {said}" in str(NonFinite("A", "A.npy", nan, infinite, (1, 2)))
