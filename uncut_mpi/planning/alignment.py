"""
What a rank of `kblocks` does about columns that are not aligned.

Where a machine's products take longer then (`GemmShape.misaligned`), every extent along columns of A, B and C and each
distance of columns has to be a multiple of 16 bytes. Panels have such distances, and padding for a few more rows of A
and C, which the executor adds. The rest is decided here, all of it or nothing: one misaligned part makes a product as
slow as three. What it costs (copies, sums, products more, each with its fixed time) is held against what it brings.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Final

from uncut_mpi.model.dtypes import Dtypes
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.parts import Part
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.blocking import HALVINGS, Step, StepKind, Steps, block_edges
from uncut_mpi.planning.schedule import Matrix

ALIGNMENT: Final = 16
"""Bytes."""

_SEEN: Final = 0.61
"""
What of the cost is seen: the rest passes beside copies, or another product. Of 2,100 simulated problems on 4 H200 the
642 for which it matters take 1.007 times as long as with the better choice, 1.015 with all of the cost and 1.009 with
two fifths; 1.006 with 0.55, which makes products of 2001×2001×2001 in f16 a tenth longer (measured: a quarter).
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Alignment:
    """
    How a rank has its products aligned.

    Attributes
    ----------
    copied : tuple of Matrix
        Which of A and B it copies into panels although it holds them.
    apart : bool
        Whether its products are summed in a panel although C is at home.
    k_step : int
        What of k its products have multiples of, but for one with the rest (elements).
    """

    copied: tuple[Matrix, ...] = ()
    apart: bool = False
    k_step: int = 1


def elements_aligned(problem: GemmProblem) -> int:
    """Return how many elements `ALIGNMENT` bytes are, of every matrix."""
    return _elements_aligned(problem.dtypes)


@functools.cache  # a search asks a thousand times
def _elements_aligned(dtypes: Dtypes) -> int:
    return max(1, ALIGNMENT // min(dtype.itemsize for dtype in dtypes))


def choose_alignment(
    problem: GemmProblem,
    machine: Machine,
    rank: int,
    part: tuple[range, range, range],
    homes: Mapping[Matrix, Part],
    steps: Steps,
    *,
    may_sum_apart: bool,
) -> Alignment:
    """
    Return what makes a rank's products aligned; nothing where they stay as slow, or where it costs more than it brings.

    An n along columns, of a transposed B, stays as it is, so that products with the last column block stay as slow.

    Parameters
    ----------
    problem, machine, rank
        Whose products.
    part : tuple of range
        The rank's rows and columns of C, and its part of k.
    homes : mapping of Matrix to Part
        What lies on this rank's device, and the part that has it.
    steps : Steps
        Of its part of k.
    may_sum_apart : bool
        Whether there is a COMBINE that brings a sum into a C at home.
    """
    shape = machine.gemm_shape.get(problem.arithmetic.name)
    if shape is None or shape.misaligned == 0:
        return Alignment()
    rows, cols, inner = part
    step = elements_aligned(problem)
    along_k = problem.trans_a != "N" or problem.trans_b == "N"
    along_columns = {  # what is stored one after the other
        Matrix.A: (rows.start, len(rows)) if problem.trans_a == "N" else (inner.start,),
        Matrix.B: (inner.start if problem.trans_b == "N" else cols.start,),
        Matrix.C: (rows.start, len(rows)),
    }
    wrong = [
        one
        for one, (start, *extents) in along_columns.items()
        if one in homes and any(extent % step for extent in (homes[one].ld, start - homes[one].rows[0], *extents))
    ]
    copied = tuple(one for one in wrong if one != Matrix.C)
    rest = along_k and len(inner) % step > 0
    stays = (problem.trans_a != "N" and len(rows) % step > 0) or (Matrix.C in wrong and not may_sum_apart)
    if stays or not (wrong or rest):
        return Alignment()

    rate = float(machine.typical_gemm_rate(problem.arithmetic)[rank])
    per_k_s = 2.0 * len(rows) * len(cols) / rate
    resident = Matrix.A in homes and Matrix.B in homes
    whole = (resident and not copied) or steps.multiplies_at_once  # its products have all of k
    products, handed_on, num_blocks = steps.products, steps.blocks, steps.num_blocks
    last = [one for one in products if one.k_stop == len(inner)]
    last_k = sum((one.k_stop - one.k_start) * one.size for one in last) / num_blocks
    gain_s = shape.misaligned * per_k_s * (len(inner) if wrong or whole else last_k)
    if problem.trans_b != "N" and len(cols) % step:
        gain_s *= 1.0 - _with_last_columns(products, len(cols), step)

    fetches = {Matrix.A: StepKind.FETCH_A, Matrix.B: StepKind.FETCH_B}
    within = float(machine.bandwidth_gb_per_s[rank, rank]) * 1e9
    stored = {
        Matrix.A: (len(rows), len(inner)) if problem.trans_a == "N" else (len(inner), len(rows)),
        Matrix.B: (len(inner), len(cols)) if problem.trans_b == "N" else (len(cols), len(inner)),
    }
    copies_s = 0.0
    for one in copied:
        (height, width), item = stored[one], problem.dtypes[one].itemsize
        copies_s += item * height * width / (within * machine.row_rates.of_local(item * height))
    # All but the first product's are made while others are computed, which are slower meanwhile.
    cost_s = max(copies_s / len(products), copies_s - per_k_s * len(inner))
    taken_s = shape.copy_share * (copies_s - cost_s)
    cost_s += machine.costs.copy_s * sum(one.kind == fetches[matrix] for matrix in copied for one in steps)
    more = 0  # products
    passes: list[tuple[float, int]] = []  # how often more all of C is moved, by products of which k
    if resident and copied:
        more += len(products) - 1
        times = sum(one.size for one in products) / num_blocks
        passes.append((times - 1, round(len(inner) / times)))
        further_k = sum(one.k_stop - one.k_start for one in products) - len(inner)
        cost_s += 2.0 * shape.tail_elements * further_k / rate
    if rest:
        more += len(handed_on) if whole else len(last)
        passes.append((1.0, len(inner) % step))
    c_bytes = problem.accumulator.itemsize * len(rows) * len(cols)
    cost_s += more * (shape.overhead_s + machine.costs.engine_latency_s)
    for times, of_k in passes:
        cost_s += times * (per_k_s * shape.half_depth + shape.moving_s(c_bytes, of_k))
    if Matrix.C in homes and (Matrix.C in wrong or (problem.rounds_c and (resident or steps.multiplies_at_once))):
        combine = float(machine.combine_gb_per_s[rank]) or 0.5 * float(machine.bandwidth_gb_per_s[rank, rank])
        cost_s += (2 * problem.dtypes[Matrix.C].itemsize * len(rows) * len(cols) + c_bytes) / (combine * 1e9)
        cost_s += len(handed_on) * (machine.costs.combine_s + machine.costs.combine_start_s)
    pays = gain_s > _SEEN * cost_s + taken_s
    return Alignment(copied, Matrix.C in wrong, step if along_k else 1) if pays else Alignment()


def _with_last_columns(products: Sequence[Step], columns: int, step: int) -> float:
    """Return which part of some products is of those that have the last column block."""
    blocks = max(one.last for one in products)
    edges = block_edges(columns, blocks - HALVINGS if blocks > 1 else 1, step)
    work = [
        (one.k_stop - one.k_start) * (one.bottom - one.top) * (edges[one.last] - edges[one.first]) for one in products
    ]
    return sum(size for one, size in zip(products, work, strict=True) if one.last == blocks) / sum(work)
