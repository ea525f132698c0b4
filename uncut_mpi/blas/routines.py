"""The routines of level 3 of BLAS: what they are told, and what a session computes for each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    from uncut_mpi.api.gemm_plan import GemmPlan
    from uncut_mpi.api.matrix import Matrix
    from uncut_mpi.api.session import Session
    from uncut_mpi.planning.options import ScheduleOptions

Shape: TypeAlias = tuple[int, int]
Letters: TypeAlias = Mapping[str, str]
"""SIDE, UPLO and others of a call, in capitals, by their names."""

_FLAGS: Final = {"side": ("left", "L"), "uplo": ("lower", "L"), "diag": ("unit", "U")}
"""What a session calls a letter, and of which one that is true."""


@dataclasses.dataclass(frozen=True, slots=True)
class Routine:
    """
    One of them, for all element types.

    Attributes
    ----------
    name : str
        Without the letter of a type; a method of `Session`.
    letters : tuple of str
        What its letters are, in their order.
    num_extents, num_matrices : int
        How many M, N and K, and how many of A, B and C it has.
    real : str
        Which scalars are real in complex types too.
    """

    name: str
    letters: tuple[str, ...]
    num_extents: int
    num_matrices: int
    real: tuple[str, ...] = ()

    @property
    def is_triangular(self) -> bool:
        """Whether it overwrites B, and has no beta."""
        return "diag" in self.letters

    @property
    def is_hermitian(self) -> bool:
        """Whether what is beyond a triangle is conjugated."""
        return self.name.startswith("he")

    @property
    def share(self) -> float:
        """Operations that it takes, of those of a product of as many rows and columns."""
        return 0.5 if self.is_triangular or self.num_matrices == 2 else 1.0

    def shapes(self, by: Letters, extents: Sequence[int]) -> list[Shape]:
        """Return the shapes of its matrices as they are stored."""
        if self.name == "gemm":
            m, n, k = extents
            return [(m, k) if by["trans_a"] == "N" else (k, m), (k, n) if by["trans_b"] == "N" else (n, k), (m, n)]
        first, second = extents
        if "side" in by:
            edge = first if by["side"] == "L" else second
            return [(edge, edge), *[(first, second)] * (self.num_matrices - 1)]
        factor = (first, second) if by["trans"] == "N" else (second, first)
        return [*[factor] * (self.num_matrices - 1), (first, first)]

    def operations(self, by: Letters, shapes: Sequence[Shape]) -> float:
        """Return how many multiplications and additions there are, of real types."""
        (m, n), taken = shapes[-1], by.get("trans_a", by.get("trans", "N"))
        return 2.0 * self.share * m * n * shapes[0][taken == "N"]

    def compute(self, session: Session, by: Letters, matrices: Sequence[Matrix], alpha: Any, beta: Any) -> None:
        """Make the call of a session. Collective."""
        flags: dict[str, Any] = {_FLAGS[name][0]: by[name] == _FLAGS[name][1] for name in by if name in _FLAGS}
        flags |= {"trans": by["trans"]} if self.is_triangular else {"beta": beta}
        if "side" not in by:
            matrices = *(self._factor(one, by) for one in matrices[:-1]), matrices[-1]
        getattr(session, self.name)(*matrices, alpha=alpha, **flags)

    def plan(
        self, session: Session, by: Letters, matrices: Sequence[Matrix], *, reads_c: bool, options: ScheduleOptions
    ) -> GemmPlan:
        """Return the plan of a product: the whole, or the largest of its parts (`num_parts`). Collective."""
        a, b, c, how = matrices[0], matrices[-2], matrices[-1], dict[str, Any](reads_c=reads_c)
        if self.name == "gemm":
            how |= {"trans_a": by["trans_a"], "trans_b": by["trans_b"]}
        elif self.is_triangular:
            middle = a.shape[0] // 2
            a, how["reads_c"] = a[middle:, :middle], True
            a, b, c = (a, c[:middle], c[middle:]) if by["side"] == "L" else (c[:, middle:], a, c[:, :middle])
        elif "side" in by:
            a, b = (a, b) if by["side"] == "L" else (b, a)
        else:
            a, b = self._factor(a, by), self._factor(b, by)
            triangle = "lower" if by["uplo"] == "L" else "upper"
            how |= {"trans_b": "C", "triangle": f"{triangle}_real"} if self.is_hermitian else {"trans_b": "T"}
            how.setdefault("triangle", triangle)
        return session.plan(a, b, c, options=options, **how)

    @property
    def num_parts(self) -> int:
        """How many products such as `plan` plans it takes about as long as."""
        return 2 if self.is_triangular or self.name.endswith("2k") else 1

    def _factor(self, matrix: Matrix, by: Letters) -> Matrix:
        return matrix if by["trans"] == "N" else matrix.H if self.is_hermitian else matrix.T


_OF_FACTORS, _SIDED, _TRIANGULAR = ("uplo", "trans"), ("side", "uplo"), ("side", "uplo", "trans", "diag")
ROUTINES: Final = (
    Routine("gemm", ("trans_a", "trans_b"), 3, 3),
    Routine("syrk", _OF_FACTORS, 2, 2),
    Routine("herk", _OF_FACTORS, 2, 2, ("alpha", "beta")),
    Routine("syr2k", _OF_FACTORS, 2, 3),
    Routine("her2k", _OF_FACTORS, 2, 3, ("beta",)),
    Routine("symm", _SIDED, 2, 3),
    Routine("hemm", _SIDED, 2, 3),
    Routine("trmm", _TRIANGULAR, 2, 2),
    Routine("trsm", _TRIANGULAR, 2, 2),
)
"""In the order in which the shared library numbers them."""
