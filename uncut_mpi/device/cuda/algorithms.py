"""Which algorithms of cublasLt are fastest for products of half types that are added up in float32."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from uncut_mpi import _native
from uncut_mpi.device.cuda.warmup import GemmSignature, WarmupList, square
from uncut_mpi.device.interface import Algorithm, Probe
from uncut_mpi.model.dtypes import DType
from uncut_mpi.planning.lower import OperationList

SHAPES: Final = ((4096, 4096, 2048), (4096, 1024, 4096), (8192, 4096, 2048))
"""m, n, k of the products that decide: k-blocks as large problems have them."""

LEAST_GAIN: Final = 0.01
"""Part of the time by which an algorithm has to be faster than the library's own choices to be taken."""

_PRODUCTS: Final = 6  # issued at once, so that the time to issue hides behind the one before
_ROUNDS: Final = 5

Time = Callable[[OperationList, int], Probe]
"""Makes a probe of a list of so many products on scratch memory."""


def scratch_bytes() -> tuple[int, int]:
    """Return the bytes of the largest A or B, and of the largest C behind it."""
    return (
        max(max(m, n) * k for m, n, k in SHAPES) * DType.f16.itemsize,
        max(m * n for m, n, _ in SHAPES) * DType.f16.accumulator.itemsize,
    )


def fastest(device: _native.CudaDevice, dtype: DType, time: Time) -> Algorithm | None:
    """
    Return the algorithm that takes least time over `SHAPES`, None if that is what the library chooses by itself.

    Times count as ratios to those of the library's own choice, each shape alike; the algorithms take turns, so that
    all meet the same clocks. What the device uses otherwise is forgotten.

    Parameters
    ----------
    device : CudaDevice
        Where nothing is in flight.
    dtype : DType
        A half type.
    time : callable
        As `Time`; operands at offset 0 of its scratch, C behind the first of `scratch_bytes`.
    """
    code = int(dtype.value)
    proposed = {shape: device.proposed_algorithms(code, *shape) for shape in SHAPES}
    known = dict.fromkeys(one for found in proposed.values() for one in found)
    taken: dict[Algorithm | None, list[Probe]] = {}
    try:
        for algorithm in (None, *known):
            device.use_algorithms({} if algorithm is None else {code: algorithm})
            taken[algorithm] = []
            for shape in SHAPES:
                taken[algorithm].append(time(_products(shape, dtype), _PRODUCTS))
        seconds: Mapping[Algorithm | None, list[list[float]]] = {one: [[] for _ in SHAPES] for one in taken}
        for _ in range(_ROUNDS):
            for algorithm, probes in taken.items():
                for probe, samples in zip(probes, seconds[algorithm], strict=True):
                    samples.append(probe.mean_seconds(0.0))
    finally:
        device.use_algorithms({})
        for probes in taken.values():
            for probe in probes:
                probe.close()
    return choose({one: [statistics.median(samples) for samples in found] for one, found in seconds.items()})


def choose(seconds: Mapping[Algorithm | None, Sequence[float]]) -> Algorithm | None:
    """
    Return the algorithm of least time by the geometric mean of the ratios to the library's own choice, None.

    Parameters
    ----------
    seconds : mapping of Algorithm or None to sequence of float
        Time of each shape, None for the library's own choice.
    """
    own = seconds[None]
    gains = {
        one: sum(math.log(mine / usual) for mine, usual in zip(found, own, strict=True)) / len(own)
        for one, found in seconds.items()
    }
    best = min(gains, key=lambda one: gains[one])
    return best if gains[best] < math.log(1 - LEAST_GAIN) else None


def _products(shape: tuple[int, int, int], dtype: DType) -> OperationList:
    """Return products added to one C, one after another."""
    m, n, k = shape
    signature: GemmSignature = dataclasses.replace(square(m, dtype), n=n, k=k, lds=(m, m, k), accumulates=True)
    todo = WarmupList(1)
    for _ in range(_PRODUCTS):
        todo.gemm(signature, signature.lds, 0)
    program = todo.program()
    operands = program.operands.copy()
    behind, _ = scratch_bytes()
    operands["offset"][0::4] = operands["offset"][3::4] = behind  # C, and C as it is read
    return dataclasses.replace(program, operands=operands)
