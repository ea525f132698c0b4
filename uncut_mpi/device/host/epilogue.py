"""What the host does with a region of C once it is summed."""

from __future__ import annotations

import math

import numpy as np

from uncut_mpi.device.views import Array, matrix_at
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.epilogue import Epilogue


class RegionEpilogue:
    """
    An epilogue with what of its vectors is for a region.

    Parameters
    ----------
    epilogue : Epilogue
        What is done.
    addresses : int, int
        Of scale and bias, which are of the type of C; 0 for one that there is not.
    first : int
        Which of their elements is for the first row, or column, of the region.
    shape : int, int
        Rows and columns of the region.
    dtype : DType
        Of C.
    """

    def __init__(
        self, epilogue: Epilogue, addresses: tuple[int, int], first: int, shape: tuple[int, ...], dtype: DType
    ) -> None:
        self._activation, self._by_rows = epilogue.activation, epilogue.along == "rows"
        rows, cols = (shape[0], 1) if self._by_rows else (1, shape[1])
        self._scale, self._bias = (
            matrix_at(address + first * dtype.itemsize, rows, cols, rows, dtype.numpy) if address else None
            for address in addresses
        )

    def scale_and_add(self, total: Array, columns: slice) -> None:
        """Multiply what is summed of some columns by the scale, and add the bias."""
        for vector, apply in ((self._scale, np.multiply), (self._bias, np.add)):
            if vector is not None:
                apply(total, (vector if self._by_rows else vector[:, columns]).astype(total.dtype), out=total)

    def activate(self, values: Array, scratch: Array) -> None:
        """Replace values by the function of each."""
        if self._activation == "relu":
            values[values < 0] = 0  # NaN stays
        elif self._activation == "gelu":
            np.multiply(values, values, out=scratch)
            np.multiply(scratch, values, out=scratch)
            np.multiply(scratch, 0.044715, out=scratch)
            np.add(scratch, values, out=scratch)
            np.multiply(scratch, math.sqrt(2 / math.pi), out=scratch)
            np.tanh(scratch, out=scratch)
            np.add(scratch, 1, out=scratch)
            np.multiply(scratch, values, out=scratch)
            np.multiply(scratch, 0.5, out=values)
