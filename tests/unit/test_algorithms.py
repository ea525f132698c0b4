"""The choice among algorithms of products by their times."""

from __future__ import annotations

import pytest

from uncut_mpi.device.cuda.algorithms import LEAST_GAIN, SHAPES, choose, scratch_bytes


def test_the_least_geometric_mean_is_chosen() -> None:
    seconds = {None: [1.0, 2.0, 4.0], (66, 7): [1.0, 2.0, 4.0], (66, 1): [0.7, 1.8, 4.2], (66, 4): [0.9, 1.8, 3.6]}
    assert choose(seconds) == (66, 1)
    assert choose({**seconds, (66, 1): [0.75, 1.95, 4.2]}) == (66, 4)


@pytest.mark.parametrize(("part", "found"), [(1 - 0.9 * LEAST_GAIN, None), (1 - 1.1 * LEAST_GAIN, (66, 1))])
def test_what_is_hardly_faster_is_not_named(part: float, found: tuple[int, int] | None) -> None:
    assert choose({None: [1.0, 3.0], (66, 1): [part, 3.0 * part]}) == found


def test_without_proposals_the_library_chooses() -> None:
    assert choose({None: [1.0, 2.0, 3.0]}) is None


def test_the_scratch_holds_every_shape() -> None:
    operand, result = scratch_bytes()
    for m, n, k in SHAPES:
        assert operand >= 2 * max(m * k, k * n)
        assert result >= 4 * m * n
