"""
The model of the GPU-only band algorithm: tile edges in closed form.

From Y. R. Choi, V. Nikolskiy and V. Stegailov, *Tuning of a matrix-matrix multiplication algorithm for
several GPUs connected by fast communication links* (PCT 2022), sections 5 and 6; the same conditions are
used in Y. R. Choi and V. Stegailov, *Multi-GPU GEMM algorithm performance analysis for Nvidia and AMD
GPUs connected by NVLink and PCIe* (2022), section 3. Equation numbers are those of the first.

Square matrices of order N lie in device memory. G devices compute. Each product makes a tile of C of edge N_i from a
band N_i×N of A and one of B. Meanwhile the device that holds a matrix sends each of the G − 1 others a band. The paper
writes single precision; here e is the bytes of an element, and e = 4 gives its formulas.
"""

from __future__ import annotations

import dataclasses
import math

from uncut_mpi.errors import ParamError
from uncut_mpi.model.dtypes import DType


def next_power_of_two(threshold: float) -> int:
    """Return the smallest power of two above `threshold` (the papers' step from a threshold to a tile edge)."""
    return 1 << max(0, math.floor(threshold)).bit_length()


@dataclasses.dataclass(frozen=True, slots=True)
class BandModel:
    """
    What the band algorithm takes on a node of equal devices.

    Attributes
    ----------
    n : int
        N, order of the square matrices (elements).
    num_devices : int
        G, devices that compute.
    math_gflop_per_s : float
        Rate of a large product on one device, 1e9 operations per second.
    memory_gb_per_s : float
        Bandwidth of a device's memory, 1e9 bytes per second.
    transfer_gb_per_s : float
        Bandwidth from one device to the others.
    dtype : DType
        Element type.
    """

    n: int
    num_devices: int
    math_gflop_per_s: float
    memory_gb_per_s: float
    transfer_gb_per_s: float
    dtype: DType = DType.f32

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "dtype" and not (math.isfinite(value) and value > 0):
                raise ParamError(f"{field.name} = {value} of a band model: it has to be positive")

    @property
    def balance(self) -> float:
        """k_BW = BW_math / BW_mem, operations per byte (equation 2)."""
        return self.math_gflop_per_s / self.memory_gb_per_s

    def intensity_threshold(self) -> float:
        """
        Return the tile edge above which a product is limited by arithmetic, not by memory (equation 4).

        N_i > 2 e k N / (2N − e k), which is 4kN / (N − 2k) for e = 4; infinite where N is too small for any.
        """
        item, balance = self.dtype.itemsize, self.balance
        room = 2 * self.n - item * balance
        return 2 * item * balance * self.n / room if room > 0 else math.inf

    def transfer_threshold(self) -> float:
        """
        Return the tile edge above which bands arrive in time for products limited by arithmetic (equation 12).

        N_i > e (G − 1) BW_math / (2 BW_transfer), which is 2 (G − 1) BW_math / BW_transfer for e = 4.
        """
        return self.dtype.itemsize * (self.num_devices - 1) * self.math_gflop_per_s / (2 * self.transfer_gb_per_s)

    def memory_bound_transfer_threshold(self) -> float:
        """
        Return the tile edge above which bands arrive in time for products limited by memory (equation 13).

        N_i > N ((G − 1) BW_mem / BW_transfer − 2), for any element type; negative where they always do.
        """
        return self.n * ((self.num_devices - 1) * self.memory_gb_per_s / self.transfer_gb_per_s - 2)

    def tile_edge(self) -> int:
        """
        Return the tile edge that the model chooses: the next power of two that keeps its conditions.

        T_task grows with the edge (equations 14 and 15), so it is the least that is above equations 4 and 12. Where no
        edge is limited by arithmetic, it is the least above equation 13.
        """
        intensity = self.intensity_threshold()
        if math.isinf(intensity):
            return next_power_of_two(self.memory_bound_transfer_threshold())
        return next_power_of_two(max(intensity, self.transfer_threshold()))
