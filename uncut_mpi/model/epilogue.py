"""What is done with each element of C once it is summed: a factor, an addend, a function."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias

from uncut_mpi.errors import ParamError
from uncut_mpi.model.arguments import flag, shown

Activation: TypeAlias = Literal["", "relu", "gelu"]
ACTIVATIONS: Final[tuple[Activation, ...]] = ("", "relu", "gelu")
Along: TypeAlias = Literal["rows", "cols"]
_OTHER: Final[Mapping[str, Along]] = {"rows": "cols", "cols": "rows"}


@dataclasses.dataclass(frozen=True, slots=True)
class Epilogue:
    """
    C := f(scale alpha op(A) op(B) + bias + beta C), once all is summed and before C is rounded to its type.

    Attributes
    ----------
    activation : {"", "relu", "gelu"}
        The function f. None; or x where x is not below 0, else 0; or x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x³))). The
        last is the form of GELU that cuBLASLt has (Hendrycks and Gimpel, 2016, section 2).
    along : {"rows", "cols"}
        Whether the vectors scale and bias have an element for each row of C, or for each column.
    bias, scale : bool
        Which of the two vectors there are. Every rank has all of them, of the type of C, with the elements next to each
        other.

    Raises
    ------
    ParamError
        If it is nothing such.
    """

    activation: Activation = ""
    along: Along = "rows"
    bias: bool = False
    scale: bool = False

    def __post_init__(self) -> None:
        activation_of(self.activation)
        if self.along not in _OTHER:
            raise ParamError(f"vectors along {shown(self.along)} of C: use 'rows' or 'cols'")
        for name in ("bias", "scale"):
            object.__setattr__(self, name, flag(name, getattr(self, name)))

    @property
    def transposed(self) -> Epilogue:
        """The same of the transposed C."""
        return dataclasses.replace(self, along=_OTHER[self.along])

    @property
    def activation_code(self) -> int:
        """The number of the activation, by which executors know it (``csrc/records.hpp``)."""
        return ACTIVATIONS.index(self.activation)

    @classmethod
    def decoded(cls, told: Mapping[str, Any]) -> Epilogue:
        """Return what `dataclasses.asdict` has made a mapping of; TypeError or ParamError if it is nothing such."""
        return cls(**told)


def activation_of(value: object) -> Activation:
    """Return a caller's function, or raise ParamError for what is none."""
    for one in ACTIVATIONS:
        if isinstance(value, str) and value == one:
            return one
    raise ParamError(f"activation is {shown(value)}: pass 'relu', 'gelu' or ''")
