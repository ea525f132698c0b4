"""With `ScheduleOptions.same_sums` C is the same in every bit on one rank and on several, wherever the matrices are."""

from __future__ import annotations

import pytest

import uncut_mpi as um
from tests.helpers.collective import collective_assert
from tests.helpers.distributed import made_of, on_host, part_of
from tests.helpers.products import random_matrix
from uncut_mpi.model.dtypes import DType
from uncut_mpi.planning.options import Blocking

OPTIONS = um.ScheduleOptions(same_sums=True, blocking=Blocking(c_rows=64, c_cols=96, block=256))
SHAPES = (150, 600), (600, 130), (150, 130)  # of A, B and C
TYPES = [
    (DType.f64, DType.f64),
    (DType.f32, DType.f32),
    (DType.bf16, DType.bf16),
    (DType.f16, DType.f32),
    (DType.c128, DType.c128),
]
WHOLE = um.Layout.whole(0)


def places(size):
    """Return layouts and memories of A, B and C."""
    last, cyclic = um.Layout.whole(size - 1), um.Layout.block_cyclic(8, 20, (1, size))
    rows, cols, everywhere = um.Layout.rows(), um.Layout.cols(), um.Layout.replicated()
    return [
        ((WHOLE, "device"), (WHOLE, "device"), (WHOLE, "device")),
        ((WHOLE, "host"), (last, "host"), (last, "device")),
        ((rows, "shared"), (rows, "shared"), (rows, "shared")),
        ((rows, "device"), (cols, "device"), (rows, "device")),
        ((cols, "device"), (rows, "host"), (cyclic, "device")),
        ((cyclic, "device"), (everywhere, "device"), (everywhere, "host")),
    ]


def product(session, operands, where, trans, beta, options=OPTIONS):
    """Return C as a matrix, that was multiplied by a plan that is proved."""
    a, b, c = (
        made_of(session, data, layout, memory=memory) for data, (layout, memory) in zip(operands, where, strict=True)
    )
    session.gemm(a, b, c, alpha=1 / 3, beta=beta, trans_a=trans[0], trans_b=trans[1], options=options)
    return c


@pytest.mark.parametrize("trans", ["NN", "TN", "CT"])
def test_c_is_the_same_on_any_ranks_and_in_all_places(comm, session, trans, open_session):
    from mpi4py import MPI

    several = []
    with open_session(MPI.COMM_SELF, verify=True) as alone:
        for number, (dtype, of_c) in enumerate(TYPES, "NTC".index(trans[0])):
            beta = (0, 0.7)[number % 2]
            shapes = [shape if op == "N" else shape[::-1] for shape, op in zip(SHAPES, trans + "N", strict=True)]
            types = dtype, dtype, of_c
            operands = [
                random_matrix(*shape, kind, (5, at)) for at, (shape, kind) in enumerate(zip(shapes, types, strict=True))
            ]
            wanted = on_host(product(alone, operands, [(WHOLE, "device")] * 3, trans, beta).local)
            for where in places(comm.size):
                c = product(session, operands, where, trans, beta)
                if on_host(c.local).tobytes() != part_of(c, wanted).tobytes():
                    several.append((dtype.name, of_c.name, beta, *map(str, where)))
    collective_assert(comm, not several, f"{several}")
