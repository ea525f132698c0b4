"""Which elements of a square operand there are, and what a product makes of them: other level 3 of BLAS than gemm."""

from __future__ import annotations

import dataclasses
from typing import Final, Literal, TypeAlias

from uncut_mpi.errors import ParamError
from uncut_mpi.model.arguments import flag, shown
from uncut_mpi.model.part_of_c import OTHER, Triangle

Kind: TypeAlias = Literal["symmetric", "hermitian", "triangular", "inverse"]
KINDS: Final = ("symmetric", "hermitian", "triangular", "inverse")
OP_BITS: Final = 7
"""What is left of an op in an operation list without its form."""
_UPPER, _UNIT, _KIND = 1 << 3, 1 << 4, 5


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """
    A square operand of which one triangle is read.

    Attributes
    ----------
    kind : {"symmetric", "hermitian", "triangular", "inverse"}
        What is beyond the triangle: its transpose, its conjugate transpose, zeros; or the product is with the inverse
        of a triangular matrix, by substitution.
    triangle : {"lower", "upper"}
        Which one is read, with the diagonal.
    unit : bool
        Whether the diagonal is not read either, and stands for ones; of triangular matrices and inverses alone.

    Raises
    ------
    ParamError
        If it is nothing such.
    """

    kind: Kind
    triangle: Triangle
    unit: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ParamError(f"kind {shown(self.kind)} of an operand: use one of {', '.join(KINDS)}")
        if self.triangle not in ("lower", "upper"):
            raise ParamError(f"triangle {shown(self.triangle)} of an operand: use 'lower' or 'upper'")
        object.__setattr__(self, "unit", flag("unit", self.unit))
        if self.unit and not self.is_triangular:
            raise ParamError(f"a {self.kind} matrix has its diagonal: unit is for triangular ones")

    @property
    def is_triangular(self) -> bool:
        """Whether there is nothing beyond the triangle."""
        return self.kind in ("triangular", "inverse")

    @property
    def code(self) -> int:
        """What is added to the op of an operand in an operation list (``csrc/records.hpp``)."""
        kind = 1 + KINDS.index(self.kind)
        return kind << _KIND | (_UNIT if self.unit else 0) | (_UPPER if self.triangle == "upper" else 0)

    @classmethod
    def of_code(cls, code: int) -> Form | None:
        """Return the form that an op of an operation list has, if it has one."""
        if not code >> _KIND:
            return None
        return cls(KINDS[(code >> _KIND) - 1], "upper" if code & _UPPER else "lower", bool(code & _UNIT))

    @property
    def transposed(self) -> Form:
        """The same of the transposed matrix, as it is stored."""
        return dataclasses.replace(self, triangle=OTHER[self.triangle])


def op_alone(op: int) -> int:
    """Return an op of an operation list without its form, if it has one."""
    return op & OP_BITS if op >> _KIND else op


Forms: TypeAlias = tuple[Form | None, Form | None]
"""Those of A and B, of which at most one has any."""
PLAIN: Final[Forms] = (None, None)
