"""Random products on the CUDA executor with a fake driver, against numpy, all of our memory full of NaN."""

from __future__ import annotations

import dataclasses
import math

import hypothesis
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.dev.fake import FakeCluster, filled_with_numbers, succeed
from tests.helpers import fuzz
from uncut_mpi.model.dtypes import MEASURED, DType


@settings(fuzz.SETTINGS, max_examples=200)
@given(case=st.one_of(fuzz.cases("product", 4, 40), fuzz.cases("epilogue", 4, 40)), tuned=st.booleans())
def test_random_products_are_right_and_write_nothing_beside_c(fake, case: fuzz.Case, tuned: bool) -> None:
    hypothesis.assume(not any(case.node_of))  # the fake has no messages
    kind = case.problem.arithmetic
    kind = kind if kind in MEASURED and kind is not DType.f16 else DType.bf16  # nor the others
    problem = dataclasses.replace(case.problem, dtype=kind)
    options = dataclasses.replace(case.options, device_memory=0, host_memory=0)
    case = dataclasses.replace(case, problem=problem, options=options, files=(), most_tasks=0)
    (_, schedule), *_ = case.plans()
    fake.product_ticks(usual=1000 * tuned)
    cluster = FakeCluster(fake, schedule, tune_from=0 if tuned else math.inf)
    scalars, is_right = filled_with_numbers(cluster, case.seed)
    succeed(cluster.run(*scalars))
    assert is_right()
