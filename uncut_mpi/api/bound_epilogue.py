"""What a call does with C once it is summed: a function, and vectors that all ranks have. Local."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from uncut_mpi.api.matrix import Matrix, MatrixInfo, Name
from uncut_mpi.errors import ParamError
from uncut_mpi.model.epilogue import Activation, Along, Epilogue, activation_of
from uncut_mpi.model.parts import Extent


class BoundEpilogue(NamedTuple):
    """An epilogue with its vectors."""

    activation: Activation = ""
    scale: Matrix | None = None
    bias: Matrix | None = None

    @classmethod
    def of(
        cls, check: Callable[[str, object], Matrix], activation: object, scale: object, bias: object
    ) -> BoundEpilogue | None:
        """
        Return what a caller asks for, None for nothing.

        Parameters
        ----------
        check : callable
            Returns a live matrix of the session that all ranks have, or raises ParamError.

        Raises
        ------
        ParamError
            For an unknown function, and a vector that is no such matrix.
        """
        if activation == "" and scale is None and bias is None:
            return None
        function = activation_of(activation)
        found = {name: None if one is None else check(name, one) for name, one in (("scale", scale), ("bias", bias))}
        return cls(function, **found)

    @property
    def vectors(self) -> tuple[Matrix | None, Matrix | None]:
        """Scale and bias."""
        return self.scale, self.bias

    @property
    def names(self) -> tuple[Name | None, Name | None]:
        """By what calls know them."""
        scale, bias = (None if one is None else one.info.name for one in self.vectors)
        return scale, bias

    def asked(self) -> dict[str, object]:
        """Return what callers pass, by their names."""
        told = {"scale": self.scale and self.scale.info, "bias": self.bias and self.bias.info}
        return {"activation": self.activation, **told}

    @property
    def infos(self) -> dict[str, MatrixInfo]:
        """What is known of the vectors that there are, by their names."""
        named = (("scale", self.scale), ("bias", self.bias))
        return {name: one.info for name, one in named if one is not None}

    def plain(self, c: MatrixInfo) -> Epilogue:
        """Return what is done with C, or raise ParamError if a vector does not fit it."""
        found = {name: _along(name, info, c) for name, info in self.infos.items()}
        if len({*found.values()}) > 1:
            raise ParamError(
                f"scale is for each of the {found['scale']} of C, and bias for each of the {found['bias']}: give both "
                "the same shape, or do one of the two yourself"
            )
        along: Along = next(iter(found.values()), "cols")
        return Epilogue(self.activation, along, bias=self.bias is not None, scale=self.scale is not None)

    def within(self, along: Along, extent: Extent) -> BoundEpilogue:
        """Return the same for some rows, or columns, of C."""
        some = slice(*extent)
        by_rows = along == "rows"
        scale, bias = (
            one if one is None or one.shape[0 if by_rows else 1] == 1 else one[some] if by_rows else one[:, some]
            for one in self.vectors
        )
        return self._replace(scale=scale, bias=bias)


def _along(name: str, vector: MatrixInfo, c: MatrixInfo) -> Along:
    (rows, cols), shape = c.layout.shape, vector.layout.shape
    if shape not in ((1, cols), (rows, 1)):
        found = "{}×{}, and C {}×{}".format(*shape, rows, cols)
        raise ParamError(f"{name} is {found}: a vector for the columns of C is 1×{cols}, one for its rows {rows}×1")
    if vector.dtype is not c.dtype:
        raise ParamError(f"{name} is of {vector.dtype.name}, and C of {c.dtype.name}: pass a vector of C's type")
    return "cols" if shape == (1, cols) else "rows"
