"""What single operations cost on a machine: products by shape, copies by row width, issuing, synchronising."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import math
from typing import TYPE_CHECKING, Any, Final

from uncut_mpi.errors import ParamError

HOST_COPY_GB_PER_S: Final = 10.0
"""
Rate at which one core copies within host memory, of which no machine knows anything so far.

A core of an AMD EPYC copied 512 MiB at 18 to 21 GB/s by itself, and at 6 to 7 GB/s beside a program that used the other
core of its virtual machine, in parts of 4 MiB as the worker takes them or as a whole. Beside transfers of devices and
other workers it was not measured.
"""

HOST_TRANSPOSED_PER_S: Final = 0.5e9
"""
Elements that one core transposes within host memory in a second, of any type.

The same core transposed 0.75 to 0.9 of 10⁹ elements a second in f64, 0.7 to 1.3 in f32 and 1.0 to 1.5 in f16, where it
copied 17 to 20 GB/s: half of it here, as of a copy above.
"""

HELD: Final = 1000.0
"""`GemmShape.sum_wait` of kernels that keep their multiprocessors to their end."""

REST_GAIN: Final = 0.46
"""
What a second of rest takes off the time that a device's products take longer at its power limit (s).

On an H200 products of four types rested for 0.1, 0.25 and 0.5 of their time, 0.7 s each. It is what fits f64, f16 and
bf16: 0.35 to 0.54 (``docs/performance.md``, 2026-11-28).
"""

TRANSPOSING_SHARE: Final = 0.5
"""Part of the rate of a COMBINE at which a device transposes: a guess, measured on no device so far."""

if TYPE_CHECKING:
    from uncut_mpi._native import ProductCost


def _core() -> Any:
    # Importing the package imports this module, before anybody is told where there is no core.
    return importlib.import_module("uncut_mpi._native")


class _NonNegative:
    """Checks that every field of a dataclass is finite and not negative."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0):
                raise ParamError(f"{field.name} = {value} of {type(self).__name__}: it cannot be negative")


@dataclasses.dataclass(frozen=True, slots=True)
class Disk(_NonNegative):
    """
    What matrices in files take to be read and written, by all ranks together.

    Attributes
    ----------
    read_gb_per_s, write_gb_per_s : float
        Rates of long runs of bytes (1e9 bytes per second). By default those of a common solid-state disk.
    call_s : float
        What each run of bytes takes besides, that does not follow another one.
    """

    read_gb_per_s: float = 2.0
    write_gb_per_s: float = 2.0
    call_s: float = 5e-5

    def __post_init__(self) -> None:
        _NonNegative.__post_init__(self)
        if min(self.read_gb_per_s, self.write_gb_per_s) <= 0:
            raise ParamError(f"{self} would never end: rates are positive")


@dataclasses.dataclass(frozen=True, slots=True)
class GemmShape(_NonNegative):
    """
    How the rate of a product depends on its shape.

    A product of m×n×k runs as blocks of `block_rows` × `block_cols`, as many at once as the device has multiprocessors,
    so that its time grows in waves. Each block needs `half_depth` more steps of k than the arithmetic says, to fill and
    drain its pipeline. Before the first `overhead_s` passes. The last blocks leave multiprocessors idle, for as long as
    `tail_elements` of C take; and C is moved:

        t = overhead_s + 2 · (W · (k + half_depth) + tail_elements · k) / rate + c_s_per_byte · extra bytes of C / h

    with W = waves · multiprocessors · block_rows · block_cols and waves = ⌈⌈m/block_rows⌉ · ⌈n/block_cols⌉ /
    multiprocessors⌉. The rate is the one of a large product, `Machine.gemm_tflop_per_s`. Without `waves` blocks are
    whole, but as many as there are: W = ⌈m/block_rows⌉ · ⌈n/block_cols⌉ · block_rows · block_cols. Libraries that have
    kernels of several block sizes, and share k among multiprocessors, hide the last wave. Blocks of 1×1 mean W = m·n.
    To write C once in the accumulator's type is part of `half_depth`. What is moved beyond it (C is read where the
    product is added to it) are the extra bytes. Of that a long product hides a part behind its arithmetic: h = 1 + k /
    c_half_depth; 1 if c_half_depth is 0. Where C is uneven (rows or columns above 256 and no multiple of it) W · k
    counts 1 + `uneven` times: libraries are best at extents that their blocks divide. Where columns of A, B or C begin
    or end at no multiple of 16 bytes it counts 1 + `misaligned` times. Tensor cores are fed by loads that need them
    there. Another product beside it can use `idle_use` of what it leaves idle. A copy within the device is a kernel
    too, and goes before blocks that have not begun. While there is one the product has 1 - `copy_share` of its rate;
    a COMBINE is not slowed. A COMBINE too goes before blocks that have not begun. It has to wait for some that have,
    `sum_wait` times as long as a block takes, but no longer than to the product's end. On a device that never rests
    products take `sustained` times as long: its clocks sink at the power limit. Of all this no paper has more than
    blocks, waves, `half_depth` and `overhead_s`. The rest is what measured products asked for
    (``docs/performance.md``, 2026-11-22, 23, 27 and 28).

    Attributes
    ----------
    block_rows, block_cols : float
        Elements of C; both 1 for no blocks.
    half_depth : float
        Steps of k at which half the rate is reached.
    overhead_s : float
        Start and end of a kernel.
    tail_elements : float
        Elements of C.
    c_s_per_byte : float
        Time to read or write a byte of C.
    uneven : float
        What the arithmetic takes longer, of its time, where C is uneven.
    misaligned : float
        What it takes longer where columns of A, B or C are not aligned.
    idle_use : float
        How much of the part of the device that a product leaves idle another one beside it can use; in [0, 1].
    waves : bool
        Whether the last wave of blocks counts as a whole one.
    c_half_depth : float
        Steps of k at which half of what moving C takes is hidden behind the arithmetic; 0: nothing ever is.
    copy_share : float
        Part of a product's rate that is lost while a copy within its device runs; in [0, 1].
    sum_wait : float
        For how many times as long as a block takes a COMBINE waits for one; `HELD` where kernels keep their
        multiprocessors to their end.
    sustained : float
        How many times as long products take in loops on a device that never rests; at least 1. What it saves while it
        rests it may spend (`REST_GAIN`).
    """

    block_rows: float = 1.0
    block_cols: float = 1.0
    half_depth: float = 0.0
    overhead_s: float = 0.0
    tail_elements: float = 0.0
    c_s_per_byte: float = 0.0
    uneven: float = 0.0
    misaligned: float = 0.0
    idle_use: float = 1.0
    waves: bool = True
    c_half_depth: float = 0.0
    copy_share: float = 0.0
    sum_wait: float = 0.5
    sustained: float = 1.0

    def __post_init__(self) -> None:
        _NonNegative.__post_init__(self)
        if not isinstance(self.waves, bool):
            raise ParamError(f"waves = {self.waves!r} of GemmShape is neither true nor false")
        if self.sustained < 1.0:
            raise ParamError(f"sustained = {self.sustained} of GemmShape: without rest products are no faster than 1")
        if self.idle_use > 1.0:
            raise ParamError(f"idle_use = {self.idle_use} of GemmShape: no more than all of it, 1, can be used")
        if self.copy_share > 1.0:
            raise ParamError(f"copy_share = {self.copy_share} of GemmShape: a copy takes no more than all of it, 1")

    def work(self, m: int, n: int, k: int, multiprocessors: int, *, aligned: bool = True) -> tuple[float, float]:
        """
        Return a product's operations as the device executes them, and the part of the device they keep busy.

        Parameters
        ----------
        m, n, k : int
            Extents (elements).
        multiprocessors : int
            Of the device.
        aligned : bool, optional
            Whether columns of A, B and C are.

        Returns
        -------
        operations : float
            Whole blocks, waves and the tail counted; divided by the rate of a large product this is the time.
        occupancy : float
            In (0, 1]; another kernel can use `idle_use` of what is left meanwhile.
        """
        return self.native().work(m, n, k, multiprocessors, aligned)

    def seconds(
        self,
        m: int,
        n: int,
        k: int,
        multiprocessors: int,
        flop_per_s: float,
        extra_bytes: float = 0.0,
        *,
        aligned: bool = True,
    ) -> float:
        """
        Return the time of a product alone on its device.

        Parameters
        ----------
        m, n, k, multiprocessors : int
            As for `work`.
        flop_per_s : float
            Rate of a large product.
        extra_bytes : float, optional
            Of C, moved besides writing it once in the accumulator's type; negative where C is narrower.
        aligned : bool, optional
            As for `work`.
        """
        cost = self.native()
        return cost.seconds(cost.work(m, n, k, multiprocessors, aligned)[0], flop_per_s, extra_bytes, k)

    def native(self) -> ProductCost:
        """Return this as the core has it, where the formula stands that the simulator uses too."""
        # Made anew: kept in a cache it would outlive the core at exit, which the core reports as a leak.
        cost: ProductCost = _core().ProductCost(*(getattr(self, field) for field in _FIELDS))
        return cost


_FIELDS: Final = tuple(field.name for field in dataclasses.fields(GemmShape))

RowTable = tuple[tuple[float, float], ...]
"""(width in bytes, share of the bandwidth) by rising width."""


@dataclasses.dataclass(frozen=True, slots=True)
class RowRates:
    """
    What two-dimensional copies get of a link's bandwidth, by the width of their contiguous rows, which lie far apart.

    Between the widths of a table the share is linear in the logarithm of the width. Below the first one it falls with
    the width, as rows per second stay the same. Beyond the last one it stays. An empty table means that rows cost
    nothing. In host memory far apart is 64 KiB. Rows below 32 KiB that lie twice their width apart cost nothing, and
    between the two what is lost grows with the distance. A device learns the pages of 64 KiB of host memory at once. So
    a row that lies in two such lines costs as much as the two rows that it is cut into. The tables are of rows that do
    not. Memory of all ranks begins at a line, a caller's own anywhere; a matrix within it is taken to begin where the
    memory does (``docs/performance.md``, 2026-11-21, 22 and 25).

    Attributes
    ----------
    device, host_in, host_out, local : tuple of (float, float)
        (width in bytes, share in (0, 1]) by rising width: between devices, from host memory, to host memory, within a
        device. If the last one is empty, it is as between devices.
    """

    device: RowTable = ()
    host_in: RowTable = ()
    host_out: RowTable = ()
    local: RowTable = ()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            table = tuple((float(width), float(share)) for width, share in getattr(self, field.name))
            object.__setattr__(self, field.name, table)
            widths = [width for width, _ in table]
            good = all(0 < share <= 1 for _, share in table) and all(0 < width < math.inf for width in widths)
            if not good or any(one >= other for one, other in itertools.pairwise(widths)):
                raise ParamError(f"{field.name} = {table} of RowRates: name rising widths with shares above 0, up to 1")


@dataclasses.dataclass(frozen=True, slots=True)
class IssueCosts(_NonNegative):
    """
    Host time to issue one operation, and how long its effect takes to be seen.

    Attributes
    ----------
    copy_s, gemm_s, combine_s : float
        Host time of one task's body.
    combine_start_s : float
        Time of a device for a COMBINE besides moving its bytes.
    wait_s, signal_s, event_s : float
        Host time of one wait for a flag, one write of a flag, one event recorded or awaited.
    event_latency_s : float
        From the end of a copy to the start of a copy that awaits it on another lane of the same rank.
    engine_latency_s : float
        The same from a copy to a product or COMBINE, and from one of those to a copy. NaN takes the value that
        `event_latency_s` has then and keeps it.
    kernel_latency_s : float
        The same from a product or COMBINE to another one; NaN as above.
    flag_latency_s : float
        The same between ranks.
    wait_lane_s, signal_lane_s : float
        Time of a lane for a task's waits for flags that are set already, and for each flag that it writes.
    call_s : float
        From the opening barrier of a call to its first operation, and from its last one to the end of the call.
    """

    copy_s: float = 0.0
    gemm_s: float = 0.0
    combine_s: float = 0.0
    combine_start_s: float = 0.0
    wait_s: float = 0.0
    signal_s: float = 0.0
    event_s: float = 0.0
    event_latency_s: float = 0.0
    engine_latency_s: float = math.nan
    kernel_latency_s: float = math.nan
    flag_latency_s: float = 0.0
    wait_lane_s: float = 0.0
    signal_lane_s: float = 0.0
    call_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("engine_latency_s", "kernel_latency_s"):
            if math.isnan(getattr(self, name)):
                object.__setattr__(self, name, self.event_latency_s)
        _NonNegative.__post_init__(self)
