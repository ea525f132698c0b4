"""Where matrices live before and after a call."""

from __future__ import annotations

import dataclasses
import enum
from typing import Final

from uncut_mpi.errors import ParamError
from uncut_mpi.model.arguments import shown, there_are, type_text
from uncut_mpi.model.locations import Location


class Matrix(enum.IntEnum):
    """A matrix of a product, and what a buffer belongs to; NONE for scratch that belongs to none."""

    A = 0
    B = 1
    C = 2
    NONE = 255


MATRICES: Final = (Matrix.A, Matrix.B, Matrix.C)


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """
    Locations of A, B and C.

    Schedulers do not look at the locations but ask what they need to know, in words that stay true of matrices that
    lie in several memories.

    Attributes
    ----------
    a, b, c : Location
        Where each whole matrix lives. C is read (beta not 0) and written there.
    """

    a: Location
    b: Location
    c: Location

    def __post_init__(self) -> None:
        for name in ("a", "b", "c"):
            location = getattr(self, name)
            if not isinstance(location, Location):
                raise ParamError(f"{name} = {shown(location)} is {type_text(location)}: pass a Location")

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

    def check_ranks(self, num_ranks: int) -> None:
        """
        Check that every rank named exists.

        Raises
        ------
        ParamError
            If a location names a rank that is not below `num_ranks`.
        """
        for name, location in (("A", self.a), ("B", self.b), ("C", self.c)):
            if location.rank is not None and not 0 <= location.rank < num_ranks:
                raise ParamError(
                    f"matrix {name} is placed on rank {location.rank}, but {there_are(num_ranks, 'rank')} "
                    f"(0 to {num_ranks - 1}): start more ranks or place it on one of these"
                )

    def of(self, matrix: Matrix) -> Location:
        """Return where a whole matrix lives."""
        return (self.a, self.b, self.c)[matrix]

    def in_host(self, *matrices: Matrix) -> bool:
        """Return whether a part of one of these matrices, or of any without arguments, lies in host memory."""
        return any(self.of(matrix).space == "host" for matrix in matrices or MATRICES)

    def on_device(self, *matrices: Matrix) -> bool:
        """Return whether a part of one of these matrices, or of any without arguments, lies on a device."""
        return any(self.of(matrix).space == "device" for matrix in matrices or MATRICES)

    def device_of(self, matrix: Matrix) -> int | None:
        """Return the rank whose device holds all of a matrix, None if there is none."""
        return self.of(matrix).rank if self.of(matrix).space == "device" else None

    def owner_of(self, matrix: Matrix) -> int | None:
        """Return the rank whose device or private host memory holds all of a matrix, None if there is none."""
        return self.of(matrix).rank

    def devices(self, *matrices: Matrix) -> set[int]:
        """Return the ranks whose devices hold a part of one of these matrices, or of any without arguments."""
        return {rank for matrix in matrices or MATRICES if (rank := self.device_of(matrix)) is not None}

    @property
    def in_shared_host(self) -> bool:
        """Whether a part of a matrix lies in host memory that all ranks read."""
        return Location.host() in (self.a, self.b, self.c)

    @property
    def c_beside_inputs(self) -> bool:
        """Whether C lies in the same memory as A or B."""
        return self.c in (self.a, self.b)

    def __str__(self) -> str:
        return f"{self.a},{self.b},{self.c}"
