"""How large the probes of a calibration are on each backend, and which products are timed. Pure."""

from __future__ import annotations

import dataclasses
from typing import Final

from uncut_mpi.calibration.probes import GemmProbe
from uncut_mpi.model.dtypes import MEASURED

NET_BYTES: Final = (8, 4 << 10, 64 << 10, 1 << 20, 16 << 20)
"""Of messages between nodes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Effort:
    """
    How large the probes of a backend are.

    Attributes
    ----------
    area_bytes : int
        Bytes of the largest copy.
    target_s : float
        Time that transfers and lists of products shall take alone.
    widths_bytes : tuple of int
        Rows of strided copies, rising.
    device_widths_bytes : tuple of int
        Rows of more copies within and between devices.
    shapes, added, misaligned : tuple of (int, int, int)
        Products, such as are added to C, and such whose columns are not aligned.
    paired : tuple of (int, int, int)
        Those of `shapes` that are also begun two at a time.
    combine : tuple of int
        Rows and columns of a COMBINE.
    litmus_bytes : tuple of int
        Blocks of the litmus.
    asynchronous : bool
        Whether issuing takes time of its own, apart from what is issued.
    """

    area_bytes: int
    target_s: float
    widths_bytes: tuple[int, ...]
    device_widths_bytes: tuple[int, ...]
    shapes: tuple[tuple[int, int, int], ...]
    added: tuple[tuple[int, int, int], ...]
    misaligned: tuple[tuple[int, int, int], ...]
    paired: tuple[tuple[int, int, int], ...]
    combine: tuple[int, int]
    litmus_bytes: tuple[int, ...]
    asynchronous: bool

    @property
    def products(self) -> list[GemmProbe]:
        """Every product to time."""
        return [
            *(GemmProbe(shape) for shape in self.shapes),
            *(GemmProbe(shape, adds=True) for shape in self.added),
            *(GemmProbe(shape, aligned=False) for shape in self.misaligned),
            *(GemmProbe(shape, lanes=2) for shape in self.paired),
        ]

    @property
    def compute_bytes(self) -> int:
        """Bytes of the largest operand of a product in the widest type, or of a COMBINE in f64."""
        # Columns end on 64 bytes: less than 64 elements more each.
        area = [max(m * n, n * k, m * k) + 64 * max(n, k) for m, n, k in (one.shape for one in self.products)]
        return max(max(one.itemsize for one in MEASURED) * max(area), 8 * self.combine[0] * self.combine[1])


_BLOCKS: Final = ((512, 256, 4096), (512, 512, 4096), (1024, 512, 4096), (1024, 1024, 4096))

EFFORTS: Final = {
    "cuda": Effort(
        area_bytes=64 << 20,
        target_s=2e-3,
        # To the host, while the device multiplies, rows of 128 KiB are slower than narrower and wider ones are
        # (docs/performance.md, 2026-11-27). Blocks of large matrices have such rows, and wider ones.
        widths_bytes=(128, 256, 512, 1024, 2048, 4096, 8192, 12288, 16384, 32768, *(1 << p for p in range(16, 20))),
        # Between devices a row above 8 KiB takes the time of one of 11 KiB (docs/performance.md, 2026-11-22). From and
        # to the host such rows are nearly as fast as contiguous ones alone one way, and as slow as those around them
        # both ways at once or at another distance (2026-11-24): no rate that a schedule could count on.
        device_widths_bytes=(8704, 10240),
        shapes=(
            *((edge, edge, edge) for edge in (512, 1024, 1536, 2048, 3072, 4096, 8192)),
            *((4096, 4096, k) for k in (128, 256, 512, 1024, 2048)),
            # Thin ones; and those around a whole number of waves, which tell blocks from their transposes.
            *((8192, 512, 2048), (512, 8192, 2048), (1024, 2048, 4096)),
            *((1408, 1408, 2048), (1408, 3072, 1024), (3072, 1408, 1024), (2816, 3072, 1024)),
            # Few columns, as at the end of a call, and few blocks.
            *((4096, 256, 2048), (8192, 128, 4096), (4096, 64, 4096), (2048, 512, 1024), (2048, 256, 1024)),
            # Uneven ones, as shares make them, and such as whole problems have.
            *((1280, 2048, 2048), (896, 2048, 4096), (2304, 1984, 1024), (1152, 4096, 1024), (4096, 640, 1024)),
            *((820, 820, 1640), (3276, 1228, 2048), (1000, 1000, 3000)),
            # Such as leave most of a last block of a kernel's empty.
            *((4096, 272, 2048), (304, 2048, 2048), (400, 400, 2048), (576, 4096, 2048), (1040, 1040, 2048)),
            *((2064, 1040, 2048), (1312, 1824, 2048), (2736, 3280, 2048)),
            # Blocks of C as schedules cut them.
            *_BLOCKS,
        ),
        added=(
            *((4096, 4096, k) for k in (128, 512, 1024, 2048, 4096)),
            *((8192, 512, 1024), (4096, 256, 2048), (8192, 4096, 2048)),
        ),
        misaligned=((1001, 1001, 3001), (3277, 1229, 2049)),
        paired=_BLOCKS,
        combine=(4096, 2048),
        litmus_bytes=(4 << 10, 64 << 10, 1 << 20),
        asynchronous=True,
    ),
    "host": Effort(
        area_bytes=4 << 20,
        target_s=2e-3,
        widths_bytes=(64, 512, 4096, 32768),
        device_widths_bytes=(),
        shapes=(
            *((edge, edge, edge) for edge in (64, 128, 256, 384)),
            *((256, 256, 32), (256, 256, 1024), (512, 64, 256)),
        ),
        added=((256, 256, 32), (384, 384, 64)),
        misaligned=(),
        paired=(),  # products of all lanes run one after another
        combine=(512, 512),
        litmus_bytes=(4 << 10, 64 << 10),
        asynchronous=False,
    ),
}
