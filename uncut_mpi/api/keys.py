"""What plans depend on: calls with equal keys share one. Local."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Sequence
from typing import Final, TypeVar

from uncut_mpi.api.matrix import MatrixInfo
from uncut_mpi.api.request import Choices, Infos, check_written
from uncut_mpi.errors import ParamError
from uncut_mpi.model.alike import Alike
from uncut_mpi.model.locations import Location
from uncut_mpi.model.parts import Order, Part
from uncut_mpi.model.placement import Placement, Where
from uncut_mpi.model.positions import Orders, orders_for_copy, orders_for_product
from uncut_mpi.model.problem import GemmProblem, StoredMatrix, conjugated, is_conjugated_alone
from uncut_mpi.planning.options import ScheduleOptions, changed

_T = TypeVar("_T")
_PLAIN: Final[tuple[Orders, Orders, Orders]] = ((None, None), (None, None), (None, None))


@dataclasses.dataclass(frozen=True, slots=True)
class PlanKey:
    """What a plan depends on, besides the machine: calls with equal keys share one."""

    problem: GemmProblem  # problem, placement, options: what is computed, where, and what is fixed about how
    placement: Placement
    options: ScheduleOptions
    # Which of the problem's user buffers, the parts of A, B and C one after another, their owner alone can use. These
    # lie in device memory that peers cannot open, in private host memory that cannot be page-locked, or in files.
    private: tuple[int, ...] = ()
    files: tuple[int, ...] = ()  # those of them that lie in files
    # In which orders of their rows and columns the caller's A, B and C are multiplied.
    orders: tuple[Orders, Orders, Orders] = _PLAIN

    @classmethod
    def of(cls, infos: Infos, choices: Choices, *, reads_c: bool, scales_only: bool) -> PlanKey:
        """
        Return the key of a product. Local.

        Parameters
        ----------
        reads_c, scales_only : bool
            Whether C is read, and whether it is all that is read.

        Raises
        ------
        ParamError
            If shapes, types, layouts or overlaps do not allow the product.
        """
        a, b, c = infos
        op_a, op_b = (conjugated(op) if one.conjugated else op for one, op in zip((a, b), choices[:2], strict=True))

        # Beside an operand with a form the other one is read in C's order; so is a Hermitian one.
        in_order_of_c = [
            other is not None or (own is not None and own.kind == "hermitian")
            for own, other in (choices.forms, choices.forms[::-1])
        ]

        def read(infos: Infos) -> tuple[GemmProblem, Infos, tuple[Order, Order, Order]]:
            a, b, c = infos
            (a, stored_a), (b, stored_b) = (
                _as_read(one, op, c.stored, in_its=in_its)
                for one, op, in_its in zip((a, b), (op_a, op_b), in_order_of_c, strict=True)
            )
            problem = GemmProblem.from_operands(
                stored_a,
                stored_b,
                c.stored,
                dtype=(a.dtype, b.dtype, c.dtype),
                trans_a=op_a,
                trans_b=op_b,
                reads_c=reads_c,
                alpha_is_zero=scales_only,
                batch=batch,
                triangle=choices.triangle,
                forms=choices.forms,
                epilogue=epilogue,
            )
            return problem, (a, b, c), (stored_a.order, stored_b.order, c.stored.order)

        batch = _products_of(infos, choices)
        epilogue = choices.epilogue and choices.epilogue.plain(c)
        problem, infos, read_in = read(infos)
        # What a triangular matrix is multiplied by may be C: who writes a column of it, or a row, has read all of that.
        in_place = (other is not None and other.is_triangular for other in choices.forms[::-1])
        read_of = {name: one for name, one, may in zip("AB", (a, b), in_place, strict=True) if not (may and one is c)}
        if choices.epilogue is not None:
            read_of |= choices.epilogue.infos
        check_written("C", c, **read_of)
        orders = _PLAIN
        if any(one.layout.orders != (None, None) for one in infos):
            layouts = a.layout, b.layout, c.layout
            if not choices.options.same_sums:  # which are of elements in their own order
                orders = orders_for_product(
                    *layouts, choices.trans_a, choices.trans_b, choices.triangle, choices.forms, epilogue
                )
            problem, infos, read_in = read(infos_in(infos, orders))
        both = (in_schedule_order(problem, of_three) for of_three in (infos, read_in))
        places = itertools.starmap(_where, zip(*both, strict=True))
        return cls(problem, Placement(*places), choices.options, *private_of(problem, infos), orders)

    @classmethod
    def of_copy(cls, infos: Infos, choices: Choices) -> PlanKey:
        """Return the key of C := A, where B is A as well and not read; a conjugated A is refused. Local."""
        source, _, target = infos
        source.check_in_memory()
        both = orders_for_copy(source.layout, target.layout)
        source, target = source.in_orders(both), target.in_orders(both)
        # What is not in the order in which the problem has both is transposed: as little as can be.
        orders = target.stored.order, source.stored.order
        reads = [(order, source.in_order(order), target.in_order(order)) for order in orders]
        order, a, c = min(reads, key=lambda read: sum(info.elements_not_in(read[0]) for info in read[1:]))
        shape = a.layout.shape if order == "F" else a.layout.shape[::-1]
        places = [_where(one, order) for one in (a, c)]
        lda, ldc = (
            one.parts[0].part.ld if isinstance(where, Location) else 0
            for one, where in zip((a, c), places, strict=True)
        )
        problem = GemmProblem(*shape, 0, (a.dtype,) * 3, lda=lda, ldc=ldc, reads_c=False, copies=True)
        placement = Placement(places[0], Location.host(), places[1])
        parts = [*_obstacles(a), ("", False), *_obstacles(c)]  # B, in one part, is not read
        return cls(problem, placement, choices.options, *_private(parts), (both, both, both))

    def for_others(self, planned: Infos, given: Infos) -> PlanKey:
        """
        Return the key for other matrices than those planned with: only who can use their parts may differ. Local.

        Raise ParamError if one of them does not fit the plan, or C cannot be written.
        """
        # A schedule counts rows and columns in these orders: parts that lie alike in their own may have others there.
        alike = True
        for name, old, new, orders in zip("ABC", planned, given, self.orders, strict=True):
            if new is not old:
                alike = False
                _check_fit(name, old.in_orders(orders), new.in_orders(orders))
        if not alike:
            a, b, c = given
            check_written("C", c, A=a, B=b)
        private, files = private_of(self.problem, infos_in(given, self.orders))
        return dataclasses.replace(self, private=private, files=files)

    def searched(self, search: str) -> PlanKey:
        """Return the key of the same by a search that goes so far (`ScheduleOptions.search`), if there is one."""
        if self.options.scheduler != "auto" or self.options.search == search:
            return self
        return dataclasses.replace(self, options=changed(self.options, search=search))

    @property
    def digest(self) -> bytes:
        """16 bytes that equal keys share on every rank."""
        return hashlib.blake2b(repr(self).encode(), digest_size=16).digest()


def infos_in(infos: Infos, orders: tuple[Orders, Orders, Orders]) -> Infos:
    """Return A, B and C with their rows and columns in other orders."""
    a, b, c = (info.in_orders(one) for info, one in zip(infos, orders, strict=True))
    return a, b, c


def in_schedule_order(problem: GemmProblem, of_three: tuple[_T, _T, _T]) -> tuple[_T, _T, _T]:
    """Return what A, B and C have as the schedule counts them, which for a C in row-major order multiplies B by A."""
    a, b, c = of_three
    return (b, a, c) if problem.swapped else of_three


def _as_read(info: MatrixInfo, op: str, c: StoredMatrix, *, in_its: bool) -> tuple[MatrixInfo, StoredMatrix]:
    """
    Return an operand and how it is read: as it is stored, or in the order in which op conjugates and transposes it.

    What is stored otherwise is transposed by copies then: nothing conjugates without transposing. `in_its`: it is read
    in C's order anyhow.
    """
    stored = info.stored
    alone = info.dtype.is_complex and is_conjugated_alone(op, stored.order, c.order)
    if not alone and not (in_its and stored.order != c.order):
        return info, stored
    order: Order = "C" if stored.order == "F" else "F"
    info = info.in_order(order)
    return info, info.stored if info.stored.order == order else StoredMatrix(stored.rows, stored.cols, order)


def _products_of(infos: Infos, choices: Choices) -> Alike[tuple[int, int, int]]:
    """
    Return m, n and k of each product of a batch, none of a plain one, as is one with a matrix for all of them.

    Raise ParamError if they do not fit; it names the first.
    """
    shapes = [info.products or Alike([(info.layout.shape, len(infos[2].products))]) for info in infos]
    edges = sorted({0}.union(*([*itertools.accumulate(times for _, times in one.runs)] for one in shapes)))
    products = list[tuple[tuple[int, int, int], int]]()
    for number, stop in itertools.pairwise(edges):  # between which those of each matrix are alike
        of_a, of_b, of_c = (one[number] for one in shapes)
        m, k = of_a if choices.trans_a == "N" else of_a[::-1]
        k_b, n = of_b if choices.trans_b == "N" else of_b[::-1]
        if k != k_b or of_c != (m, n):
            found = f"op(A) is {m}×{k}, op(B) is {k_b}×{n} and C is {of_c[0]}×{of_c[1]}"
            raise ParamError(f"shapes of product {number} do not fit: {found}")
        products.append(((m, n, k), stop - number))
    return Alike(products) if infos[2].layout.blocks else Alike()


def _where(info: MatrixInfo, order: Order) -> Where:
    """Return where a matrix lives, or its parts if they are several or in another order; of what is column-major."""
    if info.location is not None and info.parts[0].part.order == order:
        return info.location
    return info.layout if order == "F" else info.layout.transposed


def private_of(problem: GemmProblem, infos: Infos) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return which of a problem's user buffers their owner alone can use (`PlanKey.private`), and those in files."""
    return _private([part for info in in_schedule_order(problem, infos) for part in _obstacles(info)])


def _obstacles(info: MatrixInfo) -> list[tuple[str, bool]]:
    """Return of each part why its owner alone can use it, and whether it lies in a file."""
    return [(held.obstacle, held.in_file) for held in info.parts]


def _private(parts: Sequence[tuple[str, bool]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    private = tuple(at for at, (obstacle, _) in enumerate(parts) if obstacle)
    return private, tuple(at for at in private if parts[at][1])


def _check_fit(name: str, old: MatrixInfo, new: MatrixInfo) -> None:
    if (old.dtype, old.conjugated, _parts_of(old)) != (new.dtype, new.conjugated, _parts_of(new)):
        raise ParamError(f"{name} does not fit the plan: planned {_text(old, old, new)}; given {_text(new, old, new)}")


def _parts_of(info: MatrixInfo) -> tuple[Part, ...]:
    return tuple(held.part for held in info.parts)


def _text(info: MatrixInfo, old: MatrixInfo, new: MatrixInfo) -> str:
    """Return how a matrix lies, of parts the first in which two of them differ."""
    differing = (pair[info is new] for pair in zip(_parts_of(old), _parts_of(new), strict=False) if pair[0] != pair[1])
    part = next(differing, _parts_of(info)[0])
    at = part.location
    owner = "" if at.rank is None else f" of rank {at.rank}"
    how = f"order {part.order}, leading dimension {part.ld}, in {at.space} memory{owner}"
    if info.conjugated:
        how = f"conjugated, {how}"
    if info.in_parts:
        how = f"{len(info.parts)} parts, [{part.rows[0]}:{part.rows[1]}, {part.cols[0]}:{part.cols[1]}] in {how}"
    rows, cols = info.layout.shape
    return f"{rows}×{cols} {info.dtype.name}, {how}"
