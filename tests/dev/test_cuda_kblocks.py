"""Random schedules of kblocks on the CUDA executor with a fake driver, against numpy, all of our memory full of NaN."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from tests.dev.fake import FakeCluster
from tests.helpers.random_schedules import random_schedule
from uncut_mpi.model.dtypes import DType
from uncut_mpi.planning import kblocks_request

CASES = 40
# Of sums of at most 400 products of values below 1; the result rounds once to its type.
BOUNDS = {DType.f64: 1e-12, DType.f32: 1e-4, DType.tf32: 1e-4, DType.bf16: 2**-8}


@pytest.mark.parametrize("seed", range(5))
def test_random_products_are_right_and_write_nothing_beside_c(fake, monkeypatch, seed):
    monkeypatch.setattr(kblocks_request, "MIN_SLICE_BYTES", 64)
    rng = random.Random(seed)
    done = 0
    while done < CASES:
        schedule = random_schedule(rng, rng.randint(1, 4), "kblocks", 40)
        problem = schedule.problem
        if problem.dtype not in BOUNDS:
            continue  # the fake has no f16
        done += 1
        tuned = rng.random() < 0.5
        fake.product_ticks(usual=1000 * tuned)
        cluster = FakeCluster(fake, schedule, tune_from=0 if tuned else math.inf)
        for memory in cluster.memory:
            memory.fill(0xFF)  # NaN, in all padding too
        values = []
        for index in range(3):
            matrix = cluster.buffer(index)
            matrix[...] = np.random.default_rng([seed, done, index]).uniform(-1, 1, matrix.shape).astype(matrix.dtype)
            values.append(matrix.astype(np.float64))
        before = cluster.memory[2].copy()
        beta = 0.5 if problem.reads_c else 0.0
        for rank, report in cluster.run(1.5, beta).items():
            assert report.error is None, f"rank {rank}: {report.error!r}"
        a, b, c = values
        wanted = 1.5 * (a.T if problem.trans_a == "T" else a) @ (b.T if problem.trans_b == "T" else b)
        wanted += beta * c
        found = cluster.buffer(2).astype(np.float64)
        assert (np.abs(found - wanted) <= BOUNDS[problem.dtype] * (1 + np.abs(wanted))).all(), schedule.problem
        cluster.buffer(2)[...] = values[2].astype(cluster.buffer(2).dtype)
        assert np.array_equal(cluster.memory[2], before)
