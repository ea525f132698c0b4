"""Where A, B and C live, as ``--place`` says it: whole in one memory, or dealt to ranks."""

from __future__ import annotations

import dataclasses
import re
from typing import Final, TypeAlias, cast

from uncut_mpi.errors import ParamError
from uncut_mpi.model.arguments import shown
from uncut_mpi.model.layout import Layout, LocalArray
from uncut_mpi.model.locations import Location, Memory, memory_of
from uncut_mpi.model.parts import BoundLayout, Order
from uncut_mpi.model.placement import MATRICES, Placement, Where
from uncut_mpi.model.positions import Orders, orders_for_product, reordered
from uncut_mpi.model.problem import GemmProblem

FILE: Final = "f"
"""Word for a matrix in a file."""


@dataclasses.dataclass(frozen=True, slots=True)
class Dealt:
    """
    A matrix that is dealt to ranks.

    Attributes
    ----------
    layout : Layout
        What each rank has.
    memory : str
        ``"device"``, ``"host"`` (each rank's own) or ``"shared"``.
    order : str or None
        In which order each part is stored, ``"F"`` or ``"C"``; None: in that of the others.
    in_file : bool
        Whether it lies in a file, of which each rank reads and writes its part through its host memory.
    """

    layout: Layout
    memory: Memory
    order: Order | None = None
    in_file: bool = False

    @classmethod
    def parse(cls, text: str) -> Dealt:
        """
        Parse a layout, with ``@host``, ``@shared`` or ``@device`` (as without), and ``@C`` or ``@F`` behind that.

        ``f`` is a file, as `Session.open_file` deals one whose columns follow each other.

        Raises
        ------
        ParamError
            If it is none.
        """
        if text == FILE:
            return cls(Layout.cols(), "host", in_file=True)
        layout, *words = text.split("@")
        order = cast(Order, words.pop()) if words and words[-1] in ("C", "F") else None
        return cls(Layout.parse(layout), memory_of("@".join(words) or "device"), order)

    def bind(self, shape: tuple[int, int], num_ranks: int) -> Where:
        """Return which part of a matrix, stored column-major unless it says otherwise, lies where."""
        if self.memory == "shared":
            self.layout.rectangles(shape, num_ranks)
            self.layout.check_memory(self.memory)
            return Location.host()
        location = Location.device if self.memory == "device" else Location.host
        bound = self.layout.bind(shape, [LocalArray(location(rank), self.order or "F") for rank in range(num_ranks)])
        if len(bound.parts) > 1:
            return bound
        return bound.parts[0].location if bound.parts else location(self.layout.holders(num_ranks)[0])

    def __str__(self) -> str:
        if self.in_file:
            return FILE
        memory = "" if self.memory == "device" else f"@{self.memory}"
        return f"{self.layout}{memory}{'' if self.order is None else f'@{self.order}'}"


Place: TypeAlias = Location | Dealt
"""Of one matrix."""


@dataclasses.dataclass(frozen=True, slots=True)
class Places:
    """
    Where A, B and C live, before there are extents.

    Attributes
    ----------
    a, b, c : Location or Dealt
        Of each.
    """

    a: Place
    b: Place
    c: Place

    @classmethod
    def parse(cls, text: str) -> Places:
        """
        Parse three places with commas between them, as ``h,h,h``, ``2,1,h`` or ``rows,cols(3,4)@host,2``.

        Raises
        ------
        ParamError
            If there are not three of them or one cannot be parsed.
        """
        words = re.split(r",(?![^(]*\))", text)
        if len(words) != 3:
            raise ParamError(f"placement {shown(text)} has {len(words)} parts: write three, for A, B and C, as 0,0,h")
        words = [word.strip() for word in words]
        return cls(*(Dealt.parse(word) if re.match("[a-z]{3}|f$", word) else Location.parse(word) for word in words))

    @property
    def in_files(self) -> tuple[bool, bool, bool]:
        """Whether A, B and C lie in files."""
        a, b, c = (isinstance(one, Dealt) and one.in_file for one in (self.a, self.b, self.c))
        return a, b, c

    def check_ranks(self, num_ranks: int) -> None:
        """
        Check that every rank named exists.

        Raises
        ------
        ParamError
            If a location or a layout names one that is not below `num_ranks`, or a layout is for another number.
        """
        for one in (self.a, self.b, self.c):
            if isinstance(one, Dealt):
                one.layout.holders(num_ranks)
        whole = (Location.host() if isinstance(one, Dealt) else one for one in (self.a, self.b, self.c))
        Placement(*whole).check_ranks(num_ranks)

    def bind(self, problem: GemmProblem, num_ranks: int, *, in_order: bool = False) -> Placement:
        """
        Return where a product's matrices, stored column-major unless a place says otherwise, live.

        Rows and columns are in orders that the matrices share, or `in_order` as they are.

        Raises
        ------
        ParamError
            If counts of a layout do not add up to an extent.
        """
        places = zip((self.a, self.b, self.c), MATRICES, strict=True)
        found = [one.bind(problem.shape_of(of), num_ranks) if isinstance(one, Dealt) else one for one, of in places]
        if any(isinstance(one, BoundLayout) and one.orders != (None, None) for one in found):
            a, b, c = (
                BoundLayout.whole(problem.shape_of(of), one) if isinstance(one, Location) else one
                for one, of in zip(found, MATRICES, strict=True)
            )
            orders: tuple[Orders, ...] = ((None, None),) * 3
            if not in_order:
                orders = orders_for_product(a, b, c, problem.trans_a, problem.trans_b, problem.triangle, problem.forms)
            every = (reordered(one, order) for one, order in zip((a, b, c), orders, strict=True))
            found = [
                one if len(bound.parts) == 1 and isinstance(one, Location) else bound
                for one, bound in zip(found, every, strict=True)
            ]
        return Placement(*found)

    def __str__(self) -> str:
        return f"{self.a},{self.b},{self.c}"
