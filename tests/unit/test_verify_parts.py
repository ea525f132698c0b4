"""The proof follows matrices in parts: what each holder has at the start, and what it must have at the end."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from tests.helpers import interpret
from tests.helpers.faults import set_rows
from uncut_mpi import _native
from uncut_mpi.errors import ScheduleError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.locations import Location
from uncut_mpi.model.parts import BoundLayout, Part
from uncut_mpi.model.placement import Matrix, Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.builder import RegionRef, ScheduleBuilder
from uncut_mpi.planning.lower import lower, tables_in_core
from uncut_mpi.planning.schedule import Factor, Kind, Op, Role, Schedule
from uncut_mpi.planning.verify import follower_of, verify

M, N, K, CUT = 5, 4, 6, 2


def rows(columns: int, *, replica: bool = False) -> BoundLayout:
    """Return rows up to CUT on rank 0 and the others on rank 1, with leading dimensions of their own."""
    parts = [
        Part((0, CUT), (0, columns), Location.device(0), "F", 9),
        Part((CUT, M), (0, columns), Location.device(1), "F", 7),
    ]
    if replica:
        parts = [Part((0, M), (0, columns), Location.device(rank)) for rank in (0, 1)]
    return BoundLayout((M, columns), tuple(parts))


class Rows:
    """C := alpha A B + beta C by rows: B is rank 0's, and rank 1 has a copy in its SoftBuf."""

    def __init__(self, *, shift: int = 0, c_replica: bool = False) -> None:
        self.problem = GemmProblem(M, N, K, DType.f64)
        placement = Placement(rows(K), Location.device(0), rows(N, replica=c_replica))
        self.builder = builder = ScheduleBuilder(2, self.problem, placement)
        self.a = [self.user(Matrix.A, part) for part in placement.parts(Matrix.A, (M, K), M)]
        self.b = self.user(Matrix.B, *placement.parts(Matrix.B, (K, N), K))
        self.c = [self.user(Matrix.C, part) for part in placement.parts(Matrix.C, (M, N), M)]
        panel = builder.buffer(at=1, rows=K, cols=N, ld=8, dtype=DType.f64, role=Role.PANEL, matrix=Matrix.B, offset=0)
        all_b = RegionRef(panel, 0, 0, K, N)
        sent = builder.task(
            Kind.COPY, builder.copy_lane(0, 0, 1), all_b, [(RegionRef(self.b, 0, 0, K, N), Factor.ONE, Op.N)]
        )
        for rank, height in enumerate((CUT, M - CUT)):
            top = CUT * rank if c_replica else 0
            out = RegionRef(self.c[rank], top, 0, height, N)
            reads = [
                (RegionRef(self.a[rank], 0, shift * rank, height, K - shift * rank), Factor.ALPHA, Op.N),
                (all_b if rank else RegionRef(self.b, 0, 0, K, N), Factor.ONE, Op.N),
                (out, Factor.BETA, Op.N),
            ]
            builder.task(Kind.GEMM, builder.compute_lane(rank), out, reads, [sent] * rank)

    def user(self, matrix: Matrix, part: Part) -> int:
        height, width = part.stored_shape
        return self.builder.buffer(
            at=part.location, rows=height, cols=width, ld=part.ld, dtype=DType.f64, role=Role.USER, matrix=matrix
        )

    def done(self) -> Schedule:
        return self.builder.build(scheduler="hand", grid=(2, 1), tile=0)


def test_each_holder_s_rows_are_followed() -> None:
    schedule = Rows().done()
    held = [(0, 0, 2), (1, 2, 3), (2, 0, 6), (3, 0, 2), (4, 2, 3)]
    assert schedule.pieces[["buffer", "top", "rows"]].tolist() == held
    proof = verify(schedule, lower(schedule))
    assert proof.tasks == 3
    assert Schedule.decode(schedule.encode()).placement == schedule.placement


def test_rows_that_are_taken_for_others_are_refused() -> None:
    schedule = Rows().done()
    with pytest.raises(ScheduleError, match="a region leaves its buffer"):
        verify(set_rows(schedule, "regions", schedule.regions["buffer"] == 1, buffer=0))
    with pytest.raises(ScheduleError, match=r"op\(A\) holds k \[1, 6\) and op\(B\) holds k \[0, 6\)"):
        verify(Rows(shift=1).done())


def test_every_holder_must_have_the_result_of_a_replicated_c() -> None:
    with pytest.raises(ScheduleError, match=r"C \[2:5, 0:4\] ends with C_in"):
        verify(Rows(c_replica=True).done())


@pytest.mark.parametrize(
    ("table", "field", "at", "value", "words"),
    [
        ("pieces", "top", 4, 1, "holds a piece at row 1 and column 0, where no part of it is left"),
        ("pieces", "top", 4, 0, "a piece at row 0 and column 0, where no part of it is left"),
        ("pieces", "rows", 4, 2, "its piece is not all of it"),
        ("pieces", "turned", 3, 1, "or not turned as it is"),
        ("pieces", "buffer", 3, 4, "buffer 3 is the caller's C but there are 0 pieces"),
        ("pieces", "buffer", 2, 5, "buffer 2 is the caller's B but there are 0 pieces"),
        ("buffers", "location", 1, 0, "does not lie at 1"),
        ("buffers", "ld", 4, 8, "leading dimension 8 and type f64, not 3×4, 7 and f64"),
        ("buffers", "offset", 3, 0, "has an offset in a SoftBuf"),
    ],
)
def test_pieces_and_buffers_that_do_not_say_what_is_there_are_refused(
    table: str, field: str, at: int, value: int, words: str
) -> None:
    with pytest.raises(ScheduleError, match=words):
        verify(set_rows(Rows().done(), table, at, **{field: value}))


# -- parts that are stored the other way round -------------------------------------------------------


class Turned:
    """C := alpha A B + beta C on one device, every matrix stored by rows; A and C by way of buffers that are not."""

    def __init__(self, shape: tuple[int, int, int] = (5, 4, 6), *, op_b: Op = Op.T) -> None:
        m, n, k = shape
        shapes = {Matrix.A: (m, k), Matrix.B: (k, n), Matrix.C: (m, n)}
        here = Location.device(0)
        layouts = [BoundLayout.whole(shape, here, "C") for shape in shapes.values()]
        self.builder = builder = ScheduleBuilder(1, GemmProblem(m, n, k, DType.f64), Placement(*layouts))
        users, ours, offset = {}, {}, 0
        for matrix, (rows, cols) in shapes.items():
            about = {"at": here, "dtype": DType.f64, "matrix": matrix}
            user = builder.buffer(rows=cols, cols=rows, role=Role.USER, **about)
            users[matrix] = RegionRef(user, 0, 0, cols, rows)
            if matrix is not Matrix.B:
                panel = builder.buffer(rows=rows, cols=cols, role=Role.STAGING, offset=offset, **about)
                ours[matrix], offset = RegionRef(panel, 0, 0, rows, cols), 1024
        self.lane = builder.copy_lane(0, 0, 0)
        came = [self.copy(ours[one], users[one], Op.T) for one in (Matrix.A, Matrix.C)]
        a, c = ours[Matrix.A], ours[Matrix.C]
        reads = [(a, Factor.ALPHA, Op.N), (users[Matrix.B], Factor.ONE, op_b), (c, Factor.BETA, Op.N)]
        formed = builder.task(Kind.GEMM, builder.compute_lane(0), c, reads, came)
        self.copy(users[Matrix.C], c, Op.T, [formed])

    def copy(self, to: RegionRef, of: RegionRef, op: Op, awaits: Sequence[int] = ()) -> int:
        return self.builder.task(Kind.COPY, self.lane, to, [(of, Factor.ONE, op)], awaits)

    def done(self) -> Schedule:
        return self.builder.build(scheduler="hand", grid=(1, 1), tile=0)


def with_op(schedule: Schedule, task: int, op: Op, read: int = 1) -> Schedule:
    return set_rows(schedule, "operands", schedule.tasks["first_operand"][task] + read, op=op)


def test_what_is_stored_the_other_way_round_is_followed() -> None:
    schedule = Turned().done()
    verify(schedule, lower(schedule))
    assert schedule.pieces["turned"].tolist() == [1, 1, 1]
    assert not interpret.mismatch(schedule, interpret.random_data(schedule.problem))


def test_several_pieces_may_say_what_a_buffer_has_the_other_way_round() -> None:
    schedule = Turned().done()
    a, b, c = schedule.pieces.copy()[:, None]
    halves = [np.concatenate((whole, whole)) for whole in (a, c)]
    for half, along, extent, of_matrix in ((halves[0], "row", "rows", "left"), (halves[1], "col", "cols", "top")):
        half[along][1] = half[of_matrix][1] = half[extent][0] = 2
        half[extent][1] -= 2
    follower = follower_of(dataclasses.replace(schedule, pieces=np.concatenate((halves[0], b, halves[1]))))
    follower.follow(tables_in_core(schedule))
    follower.finish()


@pytest.mark.parametrize(
    ("task", "read", "op", "words"),
    [
        (0, 1, Op.N, r"op\(A\) is N, the problem says N, and it is stored transposed"),
        (2, 1, Op.T, r"op\(A\) is T, the problem says N"),
        (2, 2, Op.N, r"op\(B\) is N, the problem says N, and it is stored transposed"),
        (1, 1, Op.N, "terms of different elements of C are summed"),
        (3, 1, Op.N, r"C \[0:5, 0:5\] ends with values that are stored transposed"),
    ],
)
def test_an_operand_taken_the_other_way_round_is_refused(task: int, read: int, op: Op, words: str) -> None:
    schedule = Turned((5, 5, 5)).done()
    verify(schedule)
    with pytest.raises(ScheduleError, match=words):
        verify(with_op(schedule, task, op, read))


def test_a_copy_that_transposes_regions_which_do_not_fit_is_refused() -> None:
    with pytest.raises(ScheduleError, match="a COPY reads and writes regions of different shapes"):
        verify(with_op(Turned().done(), 0, Op.N))


@pytest.mark.parametrize(("row", "col"), [(1, 0), (0, 1)])
def test_what_is_transposed_from_elsewhere_is_refused(row: int, col: int) -> None:
    hand = Turned((5, 5, 5))
    builder, user = hand.builder, 3
    scratch = builder.buffer(at=0, rows=5, cols=5, dtype=DType.f64, role=Role.STAGING, offset=2048)
    hand.copy(RegionRef(scratch, 0, 0, 5, 5), RegionRef(user, 0, 0, 5, 5), Op.T, [3])
    hand.copy(RegionRef(user, 0, 0, 4, 4), RegionRef(scratch, row, col, 4, 4), Op.T, [4])
    with pytest.raises(ScheduleError, match=f"displaced by {row} rows and {col} columns"):
        verify(hand.done())


@pytest.mark.parametrize("places", [("1", "0"), ("0", "1"), ("h", "0"), ("0", "h0")])
def test_a_device_transposes_its_own_memory_alone(places: tuple[str, str]) -> None:
    builder = ScheduleBuilder(2, GemmProblem(4, 4, 0, DType.f64), Placement.parse("0,0,0"))
    to, of = (
        RegionRef(
            builder.buffer(at=Location.parse(at), rows=4, cols=4, dtype=DType.f64, role=Role.STAGING, offset=offset),
            0, 0, 4, 4,
        )
        for offset, at in enumerate(places)
    )  # fmt: skip
    builder.task(Kind.COPY, builder.copy_lane(0, 0, 0), to, [(of, Factor.ONE, Op.T)])
    schedule = builder.build(scheduler="hand", grid=(1, 1), tile=0)
    with pytest.raises(_native.RuleBroken, match="operands of a COPY that transposes lie in the issuing rank's device"):
        follower_of(schedule).follow(tables_in_core(schedule))
