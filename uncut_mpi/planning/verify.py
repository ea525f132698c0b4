"""
The static proof of a schedule and of its lowered lists.

`verify` starts from the caller's A, B and C and derives what every rectangle of memory holds only
by following tasks. It proves that every read is of what it should be, that no write races a read or
a write (happens-before is lane order plus awaits, never the global order), that each element of C
ends with each k, alpha and beta exactly once, that buffers fit their memory without overlapping,
that every task can be issued where it is, and that the lowered lists imply every await. It sees no
pointers, fences or transposes as executed: tests with real executors cover those.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from uncut_mpi.errors import ScheduleError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.locations import NOBODY, location_at
from uncut_mpi.planning import contents
from uncut_mpi.planning.contents import CIn, Content, Fragment, Memory, Part, Partial, Piece, Rect
from uncut_mpi.planning.happens_before import Clocks
from uncut_mpi.planning.lower import Lowering
from uncut_mpi.planning.schedule import Factor, Kind, Matrix, Op, Role, Schedule
from uncut_mpi.planning.verify_lists import verify_lists
from uncut_mpi.planning.verify_memory import verify_memory
from uncut_mpi.planning.verify_room import verify_room


@dataclasses.dataclass(frozen=True, slots=True)
class Proof:
    """
    What was proven, as counts.

    Attributes
    ----------
    tasks : int
        Tasks followed.
    reads, writes : int
        Operands whose contents and ordering were checked.
    waits : int
        Awaits between different lanes that the lowered lists were shown to imply; 0 without them.
    """

    tasks: int
    reads: int
    writes: int
    waits: int


def verify(
    schedule: Schedule,
    lowering: Lowering | None = None,
    *,
    capacity_bytes: Sequence[int] | None = None,
    user_ranges: Mapping[Matrix, tuple[object, int, int]] | None = None,
) -> Proof:
    """
    Prove a schedule and, if given, its lowering.

    Local, pure; needs no device.

    Parameters
    ----------
    schedule : Schedule
        What to prove.
    lowering : Lowering, optional
        The lowering of the same schedule; every rank's list is proven too.
    capacity_bytes : sequence of int, optional
        Bytes that each rank's SoftBuf may have, one per rank.
    user_ranges : mapping of Matrix to (object, int, int), optional
        Where the caller's matrices lie: which memory, first byte, byte after the last. C may not
        overlap A or B; A and B may.

    Returns
    -------
    Proof
        Counts of what was checked.

    Raises
    ------
    ScheduleError
        Naming the rule that is broken, the task (kind, rank, lane, regions) and the other party.
    """
    schedule.check()
    verify_memory(schedule, capacity_bytes, user_ranges)
    follower = _Follower(schedule)
    follower.run()
    waits = 0
    if lowering is not None:
        lists = [lowering.rank_list(rank) for rank in range(schedule.num_ranks)]
        waits = verify_lists(schedule, lists)
        verify_room(lists)
    return Proof(len(schedule.tasks), follower.reads, follower.writes, waits)


class _Follower:
    """Follows the tasks of one schedule and keeps what every buffer holds."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.reads = self.writes = 0
        problem = schedule.problem
        self._problem = problem
        self._op = {Matrix.A: Op[problem.trans_a], Matrix.B: Op[problem.trans_b]}
        self._lane_of: list[int] = schedule.tasks["lane"].tolist()
        self._operands: list[tuple[int, int, int, int]] = schedule.operands.tolist()
        self._buffer_of: list[int] = schedule.regions["buffer"].tolist()
        table = schedule.regions
        corners = (table["row"], table["col"], table["row"] + table["rows"], table["col"] + table["cols"])
        self._rects: list[Rect] = list(zip(*(corner.tolist() for corner in corners), strict=True))
        buffers = schedule.buffers
        self._dtype = [DType(code) for code in buffers["dtype"].tolist()]
        self._owner: list[int] = schedule.owners().tolist()
        self._on_host: list[bool] = schedule.in_host().tolist()
        self._inputs: dict[int, Content] = {}  # the caller's A and B: read only, so no history is kept
        self._user_c = -1
        self._memory: list[Memory] = []
        self._prepare()
        # The task being followed, its lane and its clock.
        self._task = self._lane = -1
        self._clock = np.empty(0, np.int32)

    def _prepare(self) -> None:
        touched: list[list[Rect]] = [[] for _ in self._dtype]
        for buffer, rect in zip(self._buffer_of, self._rects, strict=True):
            touched[buffer].append(rect)
        for at, (_, role, matrix, _, _, rows, cols, _, _) in enumerate(self.schedule.buffers.tolist()):
            content: Content = None
            rects = touched[at]
            if role == Role.USER and matrix == Matrix.C:
                self._user_c = at
                if self._problem.reads_c:
                    content = Partial(0, 0, (), False, CIn.RAW, False)
            elif role == Role.USER:
                self._inputs[at] = Piece(Matrix(matrix), 0, 0) if self._problem.has_product else None
                rects = []
            self._memory.append(Memory(rows, cols, content, rects))

    # -- following ---------------------------------------------------------------------------

    def run(self) -> None:
        """Follow every task in the global order, then check what C holds."""
        clocks = Clocks(self.schedule)
        steps = {Kind.COPY: self._copy, Kind.GEMM: self._gemm, Kind.COMBINE: self._combine}
        records: list[tuple[int, ...]] = self.schedule.tasks.tolist()
        for task, (kind, _, count, rank, lane, _, first, _, _) in enumerate(records):
            self._task, self._lane, self._clock = task, lane, clocks.advance(task)
            try:
                if kind == Kind.JOIN:
                    if count:
                        raise ScheduleError("a JOIN has no operands")
                    continue
                self._check_issuer(Kind(kind), rank, first, count)
                steps[Kind(kind)](self._operands[first : first + count])
            except ScheduleError as error:
                raise ScheduleError(f"{self.describe(task)}: {error}") from None
        self._check_result()

    def _check_issuer(self, kind: Kind, rank: int, first: int, count: int) -> None:
        if not count:
            raise ScheduleError("it writes nothing")
        if self._operands[first][1] != Factor.ONE or self._operands[first][2] != Op.N:
            raise ScheduleError("the written operand has a factor or is transposed")
        for region, _, _, _ in self._operands[first : first + count]:
            buffer = self._buffer_of[region]
            owner, on_host = self._owner[buffer], self._on_host[buffer]
            if kind is not Kind.COPY and (on_host or owner != rank):
                raise ScheduleError(
                    f"rank {rank} cannot compute on {self._describe_buffer(buffer)}: operands of GEMM and COMBINE "
                    "lie in the issuing rank's device memory"
                )
            if on_host and owner not in (NOBODY, rank):
                raise ScheduleError(
                    f"rank {rank} cannot reach {self._describe_buffer(buffer)}: rank {owner} has to issue this copy"
                )

    def _copy(self, operands: list[tuple[int, int, int, int]]) -> None:
        if len(operands) != 2 or operands[1][1] != Factor.ONE or operands[1][2] != Op.N:
            raise ScheduleError("a COPY reads one region as it is")
        target, source = operands[0][0], operands[1][0]
        to, at = self._rects[target], self._rects[source]
        if (to[2] - to[0], to[3] - to[1]) != (at[2] - at[0], at[3] - at[1]):
            raise ScheduleError("a COPY reads and writes regions of different shapes")
        if self._dtype[self._buffer_of[target]] is not self._dtype[self._buffer_of[source]]:
            raise ScheduleError("a COPY does not convert types")
        self._require_apart(target, source)
        rows, cols = at[0] - to[0], at[1] - to[1]
        parts: list[Part] = []
        for fragment in self._read(source):
            top, left, bottom, right = fragment.rect
            content = fragment.content
            if content is None:
                raise ScheduleError(self._nothing_there(source))
            parts.append(((top - rows, left - cols, bottom - rows, right - cols), content.moved(rows, cols)))
        self._write(target, parts)

    def _gemm(self, operands: list[tuple[int, int, int, int]]) -> None:
        if len(operands) not in (3, 4):
            raise ScheduleError(f"a GEMM has 3 or 4 operands, not {len(operands)}")
        target, (_, factor, _, _) = operands[0][0], operands[1]
        if factor not in (Factor.ONE, Factor.ALPHA) or operands[2][1] != Factor.ONE:
            raise ScheduleError("a GEMM scales op(A) by alpha or 1, and op(B) by 1")
        rows, inner = self._input(Matrix.A, operands[1], target)
        inner_b, cols = self._input(Matrix.B, operands[2], target)
        if inner != inner_b:
            raise ScheduleError(
                f"op(A) holds k [{inner[0]}, {inner[1]}) and op(B) holds k [{inner_b[0]}, {inner_b[1]})"
            )
        rect = self._rects[target]
        if (rows[1] - rows[0], cols[1] - cols[0]) != (rect[2] - rect[0], rect[3] - rect[1]):
            raise ScheduleError("op(A) op(B) and the written region differ in shape")
        product = Partial(rows[0] - rect[0], cols[0] - rect[1], (inner,), factor == Factor.ALPHA, CIn.ABSENT, False)
        rounds = self._rounds(target)
        if len(operands) == 3:
            self._write(target, [(rect, product._replace(rounded=rounds))])
            return
        same, c_factor, op, _ = operands[3]
        if self._buffer_of[same] != self._buffer_of[target] or self._rects[same] != rect or op != Op.N:
            raise ScheduleError("a GEMM accumulates onto the region that it writes, as stored")
        parts: list[Part] = []
        for fragment in self._read(same):
            if fragment.content is None:
                raise ScheduleError(self._nothing_there(same))
            total = contents.add(contents.scaled(fragment.content, Factor(c_factor)), product)
            parts.append((fragment.rect, total._replace(rounded=rounds)))
        self._write(target, parts)

    def _combine(self, operands: list[tuple[int, int, int, int]]) -> None:
        target = operands[0][0]
        rect = self._rects[target]
        shape = (rect[2] - rect[0], rect[3] - rect[1])
        terms: list[list[tuple[Rect, Partial]]] = []
        for region, factor, op, _ in operands[1:]:
            at = self._rects[region]
            if (at[2] - at[0], at[3] - at[1]) != shape or op != Op.N:
                raise ScheduleError("a COMBINE reads regions of the shape that it writes, as stored")
            if self._buffer_of[region] != self._buffer_of[target] or at != rect:
                self._require_apart(target, region)
            rows, cols = at[0] - rect[0], at[1] - rect[1]
            term = []
            for fragment in self._read(region):
                if fragment.content is None and factor != Factor.ZERO:
                    raise ScheduleError(self._nothing_there(region))
                top, left, bottom, right = fragment.rect
                value = contents.ZEROS
                if factor != Factor.ZERO:
                    value = contents.scaled(fragment.content, Factor(factor)).moved(rows, cols)
                term.append(((top - rows, left - cols, bottom - rows, right - cols), value))
            terms.append(term)
        rounds = self._rounds(target)
        parts: list[Part] = []
        for cell, values in contents.overlay(rect, terms):
            total = contents.ZEROS
            for value in values:
                total = contents.add(total, value)
            computed = bool(total.summed) or total.c_in is CIn.SCALED
            parts.append((cell, total._replace(rounded=rounds and computed)))
        self._write(target, parts)

    # -- operands ----------------------------------------------------------------------------

    def _input(
        self, matrix: Matrix, operand: tuple[int, int, int, int], target: int
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return which rows and columns of op(matrix) a GEMM operand holds."""
        region, _, op, _ = operand
        name = matrix.name
        self._require_apart(target, region)
        # Pieces have the problem's type wherever they are: they come from the caller by copies, which keep it.
        tiles = self._read(region)
        if not tiles:
            raise ScheduleError(f"op({name}) is empty")
        content = tiles[0].content
        if any(tile.content is None for tile in tiles):
            raise ScheduleError(self._nothing_there(region))
        if not isinstance(content, Piece) or content.matrix is not matrix:
            found = contents.describe_content(content)
            raise ScheduleError(f"op({name}) reads {found} in {self._describe_region(region)}")
        if any(tile.content != content for tile in tiles):
            raise ScheduleError(
                f"op({name}) reads pieces that do not belong side by side in {self._describe_region(region)}"
            )
        if op != self._op[matrix]:
            raise ScheduleError(f"op({name}) is {Op(op).name}, the problem says {self._op[matrix].name}")
        top, left, bottom, right = self._rects[region]
        rows, cols = (top + content.row, bottom + content.row), (left + content.col, right + content.col)
        return (rows, cols) if op == Op.N else (cols, rows)

    def _read(self, region: int) -> list[Fragment]:
        """Return what a region holds, after checking that whatever wrote it is over."""
        self.reads += 1
        buffer, rect = self._buffer_of[region], self._rects[region]
        if buffer in self._inputs:
            if rect[0] >= rect[2] or rect[1] >= rect[3]:
                return []
            return [Fragment(rect, self._inputs[buffer], -1, {})]
        tiles = self._memory[buffer].tiles(rect)
        for fragment in tiles:
            writer = fragment.writer
            if writer >= 0 and self._clock[self._lane_of[writer]] < writer:
                raise ScheduleError(
                    f"it reads {self._describe_region(region)} without awaiting what wrote it, {self.describe(writer)}"
                )
            fragment.readers[self._lane] = self._task
        return tiles

    def _write(self, region: int, parts: list[Part]) -> None:
        """Overwrite a region, after checking that every task that wrote or read it before is over."""
        self.writes += 1
        buffer, rect = self._buffer_of[region], self._rects[region]
        if buffer in self._inputs:
            raise ScheduleError(f"it writes the caller's {self._describe_region(region)}")
        tiles = self._memory[buffer].tiles(rect)
        clock = self._clock
        for fragment in tiles:
            writer = fragment.writer
            if writer >= 0 and clock[self._lane_of[writer]] < writer:
                raise ScheduleError(
                    f"it overwrites {self._describe_region(region)} without awaiting the task that wrote it, "
                    f"{self.describe(writer)}"
                )
            for lane, reader in fragment.readers.items():
                if clock[lane] < reader:
                    raise ScheduleError(
                        f"it overwrites {self._describe_region(region)} without awaiting a task that reads it, "
                        f"{self.describe(reader)}"
                    )
        if tiles:
            self._memory[buffer].overwrite(rect, tiles, parts, self._task)

    def _rounds(self, region: int) -> bool:
        """Return whether writing a sum to a region rounds it to a half type; refuse other types."""
        dtype, problem = self._dtype[self._buffer_of[region]], self._problem.dtype
        if dtype is not problem and dtype is not problem.accumulator:
            raise ScheduleError(
                f"a sum of {problem.name} products is kept as {dtype.name} in {self._describe_region(region)}"
            )
        return problem.is_half and dtype is problem

    def _require_apart(self, target: int, source: int) -> None:
        to, at = self._rects[target], self._rects[source]
        if self._buffer_of[target] == self._buffer_of[source] and (
            max(to[0], at[0]) < min(to[2], at[2]) and max(to[1], at[1]) < min(to[3], at[3])
        ):
            raise ScheduleError("the written region overlaps one that the same task reads")

    # -- the result --------------------------------------------------------------------------

    def _check_result(self) -> None:
        problem = self._problem
        summed: contents.Intervals = ((0, problem.k),) if problem.has_product else ()
        c_in = CIn.SCALED if problem.reads_c else CIn.ABSENT
        for fragment in self._memory[self._user_c].fragments() if self._user_c >= 0 else ():
            content = fragment.content
            good = isinstance(content, Partial) and (
                content.summed == summed
                and content.c_in is c_in
                and content.alpha == problem.has_product
                and (content.is_zero or (content.row, content.col) == (0, 0))
            )
            if not good:
                by = fragment.writer
                writer = f"written last by {self.describe(by)}" if by >= 0 else "never written"
                raise ScheduleError(f"C {_text(fragment.rect)} ends with {self._fault(content)}; it is {writer}")

    def _fault(self, content: Content) -> str:
        """Return what a final content of C is and why it is wrong."""
        problem = self._problem
        found = contents.describe_content(content)
        if not isinstance(content, Partial):
            return found
        if not content.is_zero and (content.row, content.col) != (0, 0):
            return f"the values of elements displaced by {content.row} rows and {content.col} columns"
        wrong = []
        if problem.has_product and content.summed != ((0, problem.k),):
            wrong.append(f"k is [0, {problem.k})")
        if content.alpha != problem.has_product and content.summed:
            wrong.append("alpha is never applied")
        if problem.reads_c and content.c_in is not CIn.SCALED:
            wrong.append("beta is never applied")
        return f"{found} ({'; '.join(wrong) or 'which is not the result asked for'})"

    # -- text --------------------------------------------------------------------------------

    def describe(self, task: int) -> str:
        """Return a task as text: index, kind, rank, lane, regions."""
        record = self.schedule.tasks[task]
        operands = self.schedule.operands_of(task)["region"].tolist()
        text = f"task {task} ({Kind(record['kind']).name}, rank {record['rank']}, lane {record['lane']}"
        if operands:
            text += f", writes {self._describe_region(operands[0])}"
        if len(operands) > 1:
            text += ", reads " + ", ".join(self._describe_region(region) for region in operands[1:])
        return text + ")"

    def _nothing_there(self, region: int) -> str:
        return (
            f"it reads {self._describe_region(region)}, which holds nothing that may be read "
            "(never written, C with beta 0, or A and B of a problem without product)"
        )

    def _describe_region(self, region: int) -> str:
        return f"{self._describe_buffer(self._buffer_of[region])} {_text(self._rects[region])}"

    def _describe_buffer(self, buffer: int) -> str:
        return describe_buffer(self.schedule, buffer)


def describe_buffer(schedule: Schedule, buffer: int) -> str:
    """Return a buffer as text: index, role, matrix, place."""
    record = schedule.buffers[buffer]
    matrix = "" if record["matrix"] == Matrix.NONE else f" of {Matrix(record['matrix']).name}"
    where = location_at(schedule.locations, int(record["location"]))
    place = where.space + ("" if where.rank is None else f" of rank {where.rank}")
    return f"buffer {buffer} ({Role(record['role']).name}{matrix}, {place})"


def _text(rect: Rect) -> str:
    return f"[{rect[0]}:{rect[2]}, {rect[1]}:{rect[3]}]"
