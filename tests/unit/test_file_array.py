"""Parts of matrix files, taken as of arrays."""

from __future__ import annotations

import pathlib
import random

import numpy as np
import pytest

from uncut_mpi.api.matrix_files import open_matrix
from uncut_mpi.command.streaming import FileArray


def random_places(rng: random.Random, extent: int) -> slice | np.ndarray:
    """Return a slice or a list of places of an extent."""
    if rng.random() < 0.6:
        first = rng.randint(0, extent)
        return slice(first, rng.randint(first, extent + 3))
    return np.array([rng.randrange(extent) for _ in range(rng.randint(1, 5))])


@pytest.mark.parametrize("order", ["F", "C"])
def test_parts_of_files_are_those_of_arrays(tmp_path: pathlib.Path, order: str) -> None:
    values = np.random.default_rng(2).random((23, 31))
    path = tmp_path / "x.npy"
    np.save(path, np.array(values, order=order))
    rng = random.Random(4)
    for _ in range(300):
        matrix, part = values, FileArray.of(open_matrix(str(path)))
        if rng.random() < 0.4:
            matrix, part = matrix.T, part.T
        rows = random_places(rng, matrix.shape[0])
        matrix, part = matrix[rows], part[rows]
        if rng.random() < 0.3:
            matrix, part = matrix.T, part.T
        if 0 in matrix.shape:
            continue
        cols = random_places(rng, matrix.shape[1])
        matrix, part = matrix[:, cols], part[:, cols]
        assert (part.shape, part.size, part.dtype) == (matrix.shape, matrix.size, matrix.dtype)
        np.testing.assert_array_equal(np.asarray(part), matrix)
        np.testing.assert_array_equal(part.astype(np.float32), matrix.astype(np.float32))
        np.testing.assert_array_equal(np.isnan(part), np.isnan(matrix))
