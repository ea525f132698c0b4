"""
A batch of products: whole products are dealt to ranks, and few large ones are cut.

A product stays where its C lies, or else the larger of its operands. Those in host memory are dealt by their
operations, in runs, so that what a rank has lies together. So are those of a few ranks where simulation expects that to
be faster. A cut product's parts are columns or rows of its C.

Each rank goes through its parts in groups: copies in, products, copies out. Copies of a group follow one another on
their lanes, and so do products, so that executors make one call of many. What lies together is one copy. Groups take
turns at a few slots, if they are large. The core does this (``csrc/batch.cpp``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from uncut_mpi import _native
from uncut_mpi.errors import ParamError, PlanError
from uncut_mpi.model.alike import Alike
from uncut_mpi.model.locations import location_table, with_ends
from uncut_mpi.model.placement import MATRICES, Matrix
from uncut_mpi.planning.buffers import Buffers, user_pieces, user_table
from uncut_mpi.planning.metrics import metric_of
from uncut_mpi.planning.options import changed
from uncut_mpi.planning.schedule import Op, Role, Schedule
from uncut_mpi.planning.setting import Setting
from uncut_mpi.planning.simulate import simulate

GROUPS: Final = 8
"""Of a rank, if they are not too small: so copies hide behind products but for an eighth of them."""

LEAST_GROUP_BYTES: Final = 2 << 20
LEAST_PIECE_BYTES: Final = 8 << 20
"""Copies of less are not worth calls of their own, nor pieces of a product that are."""

AT_ONCE_BYTES: Final = 64 << 20
"""More of a rank takes turns at slots, though there be room for all: to have memory takes longer than to wait."""

SLOTS: Final = 3
"""One arrives, one is multiplied, one leaves."""

FEW: Final = 16
"""A rank that has so many products is busy about as long as others, so that none is cut."""

STEP: Final = 64
"""Cuts are at multiples of so many rows or columns, for products as fast as others."""

CUT_S: Final = 1e-4
"""Nor is a product cut that takes less."""


def schedule(setting: Setting) -> Schedule:
    """
    Return the schedule of a batch. Pure and deterministic.

    Raises
    ------
    PlanError, ParamError
        If another scheduler is asked for, or a way to cut one product; for a metric that needs unknown watts.
    CapacityError
        If a device has no room for what an element of C needs.
    """
    options, machine = setting.options, setting.machine
    if options.scheduler != "auto":
        raise PlanError(f"{options.scheduler} makes one product and no batch: leave the scheduler to auto")
    refused = [name for name in options.given if name != "devices"]
    if refused:
        raise ParamError(
            f"{', '.join(refused)} was given, which is for one product and no batch: leave it out (a batch takes "
            "devices, metric, device_memory and host_memory)"
        )
    metric, computing = metric_of(options.metric, machine), options.computing_ranks(setting.num_ranks)
    # Fewer ranks may take less energy, and no less time.
    counts = range(1, len(computing)) if metric.needs_watts and options.devices is None else ()
    sets = (options.devices, *(tuple(computing[:count]) for count in counts))
    several = [one for devices in sets for one in _schedules(setting.but(options=changed(options, devices=devices)))]
    return several[0] if len(several) == 1 else min(several, key=lambda one: metric.value(simulate(one, machine)))


def _schedules(setting: Setting) -> Iterator[Schedule]:
    """Yield ways to do it: products that have a home stay there, or all are dealt, where that may pay."""
    problem, machine, ranks = setting.problem, setting.machine, setting.num_ranks
    about, devices = (machine.ranks, problem, setting.placement), setting.options.computing_ranks(ranks)
    rates: list[float] = machine.gemm_rate(problem.arithmetic).tolist()
    core = _native.Batch(
        ranks,
        machine.serial_copies,
        Op[problem.trans_a],
        Op[problem.trans_b],
        problem.reads_c,
        problem.dtypes,
        with_ends(location_table(machine.ranks)),
        user_table(*about),
        user_pieces(problem, setting.placement),
        Alike.of(problem.batch).table(3),
        devices,
        rates,
        setting.room,
        (GROUPS, LEAST_GROUP_BYTES, LEAST_PIECE_BYTES, AT_ONCE_BYTES, SLOTS, FEW, STEP),
        CUT_S,
    )
    for deals_all in (False, *[True] * _may_pay(setting, np.array(core.work_of_homes), np.array(rates))):
        buffers = Buffers(*about)
        if (short := core.arrange(deals_all)) is not None:
            setting.check_capacity([0] * short[0] + [short[1]], least="needs at least")
        for rank, matrix, rows, cols in core.panels:
            buffers.add(rank, (rows, cols), problem.dtypes[matrix], Matrix(matrix), Role.PANEL)
        setting.check_capacity(buffers.arena_bytes)
        grid = 1, max(1, core.num_sharing)
        yield setting.schedule(buffers.table(), core.emit(), scheduler="batch", grid=grid, splits=1, tile=0)


def _may_pay(setting: Setting, work: np.ndarray, rates: np.ndarray) -> bool:
    """
    Whether it may take less to deal all products evenly, by rates alone.

    Parameters
    ----------
    work, rates : ndarray of float64, shape (num_ranks,)
        What each rank's products that stay there amount to, and its rate.
    """
    problem, machine, devices = setting.problem, setting.machine, [*setting.options.computing_ranks(setting.num_ranks)]
    busiest = max(devices, key=lambda rank: (work[rank] / rates[rank], rank))
    longest, evenly = work[busiest] / rates[busiest], problem.flops / 2 / rates[devices].sum()
    rate = 1e9 * sum(machine.bandwidth_gb_per_s[busiest, rank] for rank in devices if rank != busiest)
    moved = sum(map(problem.bytes_of, MATRICES))
    return bool(evenly < longest / 2**0.5 and moved / len(devices) / rate < 2 * longest)
