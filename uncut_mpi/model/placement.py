"""Where matrices live before and after a call."""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias

from uncut_mpi.errors import ParamError, PlanError
from uncut_mpi.model.arguments import shown, there_are, type_text, value_of_callers
from uncut_mpi.model.locations import Location
from uncut_mpi.model.parts import BoundLayout, Extent, Part


class Matrix(enum.IntEnum):
    """A matrix of a product, and what a buffer belongs to; NONE for scratch that belongs to none."""

    A = 0
    B = 1
    C = 2
    NONE = 255


MATRICES: Final = (Matrix.A, Matrix.B, Matrix.C)

Where: TypeAlias = Location | BoundLayout
"""Where a matrix lives: whole in one memory, or in parts."""


@value_of_callers
@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """
    Where A, B and C live.

    Schedulers do not look at the memories but ask what they need to know, in words that are true of matrices in parts
    too.

    Attributes
    ----------
    a, b, c : Location or BoundLayout
        Of a whole matrix its memory, else its parts, as those of a column-major matrix (rows and columns of what is
        stored). C is read (beta not 0) and written there.
    in_parts : bool
        Whether a matrix is in parts.
    """

    a: Where
    b: Where
    c: Where
    # What a search asks all the time is found once: of each matrix its memories, and of what kinds they are.
    in_parts: bool = dataclasses.field(init=False, repr=False, compare=False)
    _locations: tuple[tuple[Location, ...], ...] = dataclasses.field(init=False, repr=False, compare=False)
    _spaces: tuple[tuple[str, ...], ...] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("a", "b", "c"):
            where = getattr(self, name)
            if not isinstance(where, Location | BoundLayout):
                raise ParamError(f"{name} = {shown(where)} is {type_text(where)}: pass a Location or a BoundLayout")
        every = self.a, self.b, self.c
        locations = tuple(
            (one,) if isinstance(one, Location) else tuple(dict.fromkeys(part.location for part in one.parts))
            for one in every
        )
        object.__setattr__(self, "in_parts", any(isinstance(one, BoundLayout) for one in every))
        object.__setattr__(self, "_locations", locations)
        spaces = tuple(tuple(dict.fromkeys(one.space for one in some)) for some in locations)
        object.__setattr__(self, "_spaces", spaces)

    @classmethod
    def parse(cls, text: str) -> Placement:
        """
        Parse three comma-separated locations, as ``h,h,h``, ``0,0,0`` or ``2,1,h``.

        Raises
        ------
        ParamError
            If there are not three of them or one cannot be parsed.
        """
        parts = text.split(",") if isinstance(text, str) else []
        if len(parts) != 3:
            raise ParamError(f"placement {shown(text)} has {len(parts)} parts: write three, for A, B and C, as 0,0,h")
        return cls(*(Location.parse(part) for part in parts))

    def encoded(self) -> Any:
        """Return it as plain values, for JSON: text where all matrices are whole."""
        if self.in_parts:
            return [one.encoded() if isinstance(one, BoundLayout) else str(one) for one in (self.a, self.b, self.c)]
        return str(self)

    @classmethod
    def decoded(cls, values: Any) -> Placement:
        """Return what `encoded` was made of; ValueError, TypeError or ParamError for anything else."""
        if isinstance(values, str):
            return cls.parse(values)
        a, b, c = (Location.parse(one) if isinstance(one, str) else BoundLayout.decoded(one) for one in values)
        return cls(a, b, c)

    def check_ranks(self, num_ranks: int) -> None:
        """
        Check that every rank named exists.

        Raises
        ------
        ParamError
            If a location names a rank that is not below `num_ranks`.
        """
        for matrix in MATRICES:
            for location in self.locations(matrix):
                if location.rank is not None and not 0 <= location.rank < num_ranks:
                    raise ParamError(
                        f"matrix {matrix.name} is placed on rank {location.rank}, but {there_are(num_ranks, 'rank')} "
                        f"(0 to {num_ranks - 1}): start more ranks or place it on one of these"
                    )

    def of(self, matrix: Matrix) -> Location:
        """
        Return where a whole matrix lives.

        Raises
        ------
        PlanError
            If it is in parts.
        """
        where = self._where(matrix)
        if isinstance(where, BoundLayout):
            raise PlanError(
                f"{matrix.name} is in parts ({where}), as matrices in files are, too, and this scheduler takes "
                "whole matrices only: use kblocks, uncut or auto"
            )
        return where

    def whole(self) -> tuple[Location, Location, Location]:
        """Return where A, B and C live, all of them whole; errors as of `of`."""
        return self.of(Matrix.A), self.of(Matrix.B), self.of(Matrix.C)

    def parts(self, matrix: Matrix, shape: tuple[int, int], ld: int) -> tuple[Part, ...]:
        """Return the parts of a matrix, column-major; of a whole one of this shape and leading dimension just one."""
        where = self._where(matrix)
        if isinstance(where, BoundLayout):
            return where.parts
        rows, cols = shape
        return (Part((0, rows), (0, cols), where, "F", ld),)

    def seen(self, matrix: Matrix, rows: Extent, cols: Extent) -> Where:
        """Return where some rows and columns of a matrix live."""
        where = self._where(matrix)
        return where.sliced(rows, cols) if isinstance(where, BoundLayout) else where

    def straight(self, readers: Sequence[int]) -> Placement:
        """Return the same with matrices in parts as `BoundLayout.straight` has them; all others are column-major."""
        every = (one.straight(readers) if isinstance(one, BoundLayout) else one for one in (self.a, self.b, self.c))
        return Placement(*every)

    def locations(self, matrix: Matrix) -> tuple[Location, ...]:
        """Return the memories that hold a part of a matrix, each once."""
        return self._locations[matrix]

    def in_host(self, *matrices: Matrix) -> bool:
        """Return whether a part of one of these matrices, or of any without arguments, lies in host memory."""
        return any("host" in self._spaces[matrix] for matrix in matrices or MATRICES)

    def on_device(self, *matrices: Matrix) -> bool:
        """Return whether a part of one of these matrices, or of any without arguments, lies on a device."""
        return any("device" in self._spaces[matrix] for matrix in matrices or MATRICES)

    def device_of(self, matrix: Matrix) -> int | None:
        """Return the rank whose device alone holds all of a matrix, None if there is none."""
        return self.owner_of(matrix) if self._spaces[matrix] == ("device",) else None

    def owner_of(self, matrix: Matrix) -> int | None:
        """Return the rank whose device or private host memory alone holds all of a matrix, None if there is none."""
        locations = self._locations[matrix]
        return locations[0].rank if len(locations) == 1 else None

    def devices(self, *matrices: Matrix) -> set[int]:
        """Return the ranks whose devices hold a part of one of these matrices, or of any without arguments."""
        of_devices = (location.rank for location in self._all(*matrices) if location.space == "device")
        return {rank for rank in of_devices if rank is not None}

    @property
    def in_shared_host(self) -> bool:
        """Whether a part of a matrix lies in host memory that all ranks read."""
        return Location.host() in self._all()

    @property
    def c_beside_inputs(self) -> bool:
        """Whether a part of C lies in the same memory as one of A or B."""
        return not {*self.locations(Matrix.C)}.isdisjoint(self._all(Matrix.A, Matrix.B))

    def _where(self, matrix: Matrix) -> Where:
        return (self.a, self.b, self.c)[matrix]

    def _all(self, *matrices: Matrix) -> Iterator[Location]:
        return itertools.chain.from_iterable(self._locations[matrix] for matrix in matrices or MATRICES)

    def __str__(self) -> str:
        return f"{self.a},{self.b},{self.c}"
