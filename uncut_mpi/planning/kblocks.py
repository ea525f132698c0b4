"""
Few large products: each rank's block of C is updated one k-block at a time.

Where `uncut` multiplies tiles, a rank here multiplies all its rows by all its columns, or a block of them, over a
stretch of k. The order is that of `uncut_mpi.planning.blocking`. With `splits` > 1 the ranks of a process grid
rows × cols × splits share k too (2.5D and 3D algorithms), and their partial sums are added up.

What several ranks need of A and B leaves its origin once, and they hand it on; it enters each node once. C is combined
at its owner or where it is computed. `schedule` says how, who issues a copy, and which lanes there are.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Hashable, Sequence
from typing import Any, Final

import numpy as np

from uncut_mpi import _native
from uncut_mpi.errors import CapacityError, ParamError, PlanError
from uncut_mpi.model.form import PLAIN
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.decomposition import starts_of
from uncut_mpi.planning.kblocks_defaults import choose, choose_grid, in_rings
from uncut_mpi.planning.kblocks_request import DealtPanels, problem_in_core
from uncut_mpi.planning.limits import MAX_TASKS
from uncut_mpi.planning.node_grid import grid_over_nodes
from uncut_mpi.planning.option_fields import declared
from uncut_mpi.planning.options import MOST_C_SLOTS, Blocking, ScheduleOptions, changed
from uncut_mpi.planning.out_of_core import cut_to_fit
from uncut_mpi.planning.partition import Partition
from uncut_mpi.planning.same_sums import dealt_tiles
from uncut_mpi.planning.schedule import BUFFER_DTYPE, Schedule
from uncut_mpi.planning.setting import Setting
from uncut_mpi.planning.ways import ways_of

# What is said of the schedule beside k-blocks, which the steps of a request have: no option can be forgotten here.
_IN_STEPS: Final = ("first", "block", "growth", "order", "tail")
_CUT: Final = operator.attrgetter(*(name for name, about in declared(ScheduleOptions) if "kblocks" in about.takers))
_HOW: Final = operator.attrgetter(*(name for name, _ in declared(Blocking) if name not in _IN_STEPS))


def schedule(setting: Setting, *, most_tasks: int = MAX_TASKS) -> tuple[Schedule, ScheduleOptions]:
    """
    Return the schedule for a problem that has a product, and the options with everything set.

    Pure and deterministic.

    Parameters
    ----------
    setting : Setting
        Grid, devices, shares and `blocking` are taken from its options; what these leave open `choose` decides.

    Raises
    ------
    ParamError
        If grid, devices or shares do not fit the ranks.
    PlanError
        If there is no product: C is only scaled; or if there would be more than `most_tasks` tasks.
    CapacityError
        If a rank has too little device memory for its panels.

    Notes
    -----
    * **A and B.** What several ranks need leaves its origin once, so ports and host links carry every byte once. Each
      rank takes a slice (whole stored columns) and hands it to the others. Or, between devices, one rank takes the
      whole piece (`delivery`); it always does where devices serve their copies one after another. A rank that holds the
      matrix itself reads it in place, unless it copies it so that its products are aligned
      (``csrc/kblocks_alignment.cpp``). Then a k that is no multiple of 16 bytes has a product for the rest, too. What a
      rank holds in part it copies beside the rest, or reads in place (`begin` = ``"held"``). Then it begins there, with
      products that await nothing. It takes the rest of k as it goes round, from one holder after the other. So it
      does with rows or columns of C for which it holds all of k of A or B, if it takes one block of C after the other.
    * **C** is handed on per block. Combined *at its owner* (`combine` = ``"owner"``, for a C on a device) the products
      travel and C does not. Combined *where it is computed* (``"worker"``) C is fetched. It goes into the products'
      place if the order has it there before the first of them, else beside them. Or the last few column blocks (`away`)
      are combined where they are computed, and the others at the owner. Otherwise the owner's device, with its own
      products and everybody's sums, would be the last to end. Partial sums of a k split are added by the owner, or each
      worker adds up a slice of the columns. Half types sum in float32 and are rounded once. A block is formed
      *directly*, without a sum apart, if its C is at home or there before its products. With half types all of its k
      also has to be in one product, which sums in float32 and rounds once.
    * **A rank that has A and B**, and uses both as they lie, multiplies all of k at once, whatever blocks the others
      take. It begins when the first fetch, for which all others wait, is issued. It makes one product where C is at
      home too (in place), else one per column block. Where its blocks are formed directly it takes them as the others
      do.

    Who issues a copy: whoever's private host memory it touches; between shared host memory and a device, the device;
    between devices, the source (push). There is one lane per (issuing rank, source, destination), and between devices
    another for results, which await products. Products are on compute lanes 0 and 3 in turn, where two may have begun
    (`lanes`), and COMBINE on lanes 1 and 2. Where a device serves its copies one after another
    (`Machine.serial_copies`) it has one lane for fetches and one for results to all other devices. There a piece that
    several ranks need goes from its device to one of them whole, before the pieces that one rank needs. It goes to
    the rank that gets most pieces of its own. Those then occupy its way in, and what it hands on uses other ports. Of
    equal ranks the one that has least to send in all gets it. By list scheduling (`delivery` = ``"earliest"``) that
    decides only between copies that could begin at one time.

    Where links between devices differ (`uncut_mpi.planning.ways`), nothing goes over a slow link that other ranks can
    lead it round. These keep it in a few slots of a buffer, which are used again and again. List scheduling then knows
    what a byte takes on each link, and is what a schedule has if nobody asks for another delivery.

    **What does not fit a rank's memory** is computed one block of C after the other (`Blocking.slots`; `csrc` has it as
    rings). The k-blocks of A and B have a few slots, each of which has one k-block after the other. A copy into a slot
    awaits all that read what was there before: an await as any other. All ranks take the same steps, so what several
    need still leaves its origin once. The next block of C begins while the one before it leaves. Blocks that follow
    each other share rows or columns, as their order goes there and back. k goes there and back too, so that the last
    k-blocks of what two blocks share need not come again. `uncut_mpi.planning.out_of_core` chooses the sizes.
    """
    planner = Planner(setting)
    made = planner.prepare(setting.options)
    try:
        return made.schedule(most_tasks), made.options
    except CapacityError:  # with fewer panels, if it fits so
        made = planner.prepare(setting.options, aligns=False)
        return made.schedule(most_tasks), made.options


class Planner:
    """
    Prepares schedules of one problem, which have much in common; a search asks for hundreds.

    Parameters
    ----------
    setting : Setting
        As for `schedule`.

    Attributes
    ----------
    aligns : bool
        Whether ranks may take panels for what they hold: on machines whose products are slower without.

    Raises
    ------
    PlanError
        If there is no product.
    """

    def __init__(self, setting: Setting) -> None:
        problem = setting.problem
        if not problem.has_product:
            raise PlanError("kblocks schedules products; C is only scaled here")
        self.setting, self.problem, self.placement, self.machine = setting, problem, setting.placement, setting.machine
        # Of a matrix with a form products have all, and no part that is aligned.
        misaligned = setting.machine.product_shape(problem.arithmetic).misaligned
        self.aligns = misaligned > 0 and problem.forms == PLAIN
        self._in_core = problem_in_core(setting)
        self._dealt: dict[tuple[object, ...], DealtPanels] = {}

    def prepare(self, options: ScheduleOptions, *, aligns: bool = True, in_core: bool = False) -> Prepared:
        """
        Return what `schedule` makes a schedule of, so that it can be made elsewhere, or not at all.

        Pure and deterministic. Errors are those of `schedule`, but for CapacityError and tasks that are too many where
        k-blocks are asked for.

        Parameters
        ----------
        options : ScheduleOptions
            As for `schedule`.
        aligns : bool, optional
            Whether ranks may take panels for what they hold, so that their products are aligned.
        in_core : bool, optional
            Whether ranks have room for all they need, unless the options say otherwise. Else what does not fit is cut
            so that it does (`uncut_mpi.planning.out_of_core`), where that is possible.
        """
        if self.problem.sums is not None:
            return self._with_same_sums(options, self.problem.sums)
        options = self._over_nodes(options)
        how, dealt = self._deal(options)
        dealt.check_steps(how)
        aligns = aligns and self.aligns
        made = Prepared(self, dealt, options, how, aligns=aligns)
        if not options.blocking.block and made.request.tasks_at_most > MAX_TASKS:
            if in_core and not made.fits:
                return made  # whatever k-blocks it has, and to count its tasks may take seconds
            how = dealt.with_longer_k_blocks(how)
            made = Prepared(self, dealt, options, how, aligns=aligns)
        if in_core or aligns or self.setting.surely_fits or options.areas is not None or made.fits:
            return made
        too_large = min(self.setting.room) < 0  # the matrices there are already
        if too_large or not options.blocking.may_be_in_rings:
            return made
        is_open = options.blocking == Blocking()  # then no more is needed than the smallest blocks take
        if how.splits > 1:
            options = changed(options, blocking=changed(options.blocking, splits=1))
            how, dealt = self._deal(options)
        smaller = cut_to_fit(dealt, how, options.blocking)
        dealt.check_steps(smaller)
        return Prepared(self, dealt, options, smaller, aligns=False, is_open=is_open)

    def _with_same_sums(self, options: ScheduleOptions, sums: tuple[int, int, int]) -> Prepared:
        """Return one with the sums of `uncut_mpi.planning.same_sums`: in rings, whose panels are of one shape."""
        devices = options.computing_ranks(self.machine.num_ranks)
        partitions, several = dealt_tiles(self.problem, len(devices))
        asked = Blocking(
            first=sums[2],
            block=sums[2],
            growth=2,
            columns=1,
            lanes=2,
            delivery="balanced" if ways_of(self.machine).even else "earliest",
            c_rows=sums[0],
            c_cols=sums[1],
            c_slots=1,
            sweep="again",
        )
        dealt = DealtPanels(self.setting, self._in_core, partitions, devices, [0, self.problem.k])
        dealt.check_steps(in_rings(asked))
        for c_slots, (slots, b_slots) in itertools.product(range(min(MOST_C_SLOTS, len(partitions)), 0, -1), several):
            how = in_rings(changed(asked, slots=slots, b_slots=b_slots, c_slots=c_slots))
            made = Prepared(self, dealt, options, how, aligns=False)
            if made.fits:
                break
        return made

    def _over_nodes(self, options: ScheduleOptions) -> ScheduleOptions:
        """Return options with the grid of several nodes, where nobody says how C is cut among which ranks."""
        asked = (options.grid, options.devices, options.row_shares, options.col_shares, options.k_shares, options.areas)
        if self.machine.num_nodes == 1 or asked != (None,) * 6 or self.problem.part is not None:
            return options
        splits = choose(self.problem, self.placement, self.machine.num_ranks, options).splits
        return options if splits > 1 else changed(options, **self._grid_over_nodes)

    @functools.cached_property
    def _grid_over_nodes(self) -> dict[str, Any]:
        return grid_over_nodes(self.setting)

    def _deal(self, options: ScheduleOptions) -> tuple[Blocking, DealtPanels]:
        """Return how a rank's part is cut, where it has room for all of it, and the problem as it is dealt to ranks."""
        devices = options.computing_ranks(self.machine.num_ranks)
        how = choose(self.problem, self.placement, len(devices), options, even=ways_of(self.machine).even)
        if how.splits > len(devices):
            raise ParamError(f"k shall be split {how.splits} times, but {len(devices)} ranks compute: use more ranks")
        key = (how.splits, *_CUT(options))  # a search varies the rest more often
        dealt = self._dealt.get(key)
        if dealt is None:
            partitions = self._partitions(len(devices) // how.splits, options)
            k_starts = _k_starts(self.problem, how.splits, options.k_shares)
            dealt = self._dealt[key] = DealtPanels(self.setting, self._in_core, partitions, devices, k_starts)
        return how, dealt

    def _partitions(self, num_places: int, options: ScheduleOptions) -> list[Partition]:
        areas, shares = options.areas, (options.row_shares, options.col_shares)
        if areas is None:
            grid = choose_grid(self.placement, num_places, options, transposed=self.problem.swapped)
            return Partition.of_rectangles(self.problem, lambda one: Partition.of_grid(one, grid, *shares))
        named = sum(map(len, areas))
        if named != num_places:
            parts = f" each of the {options.blocking.splits} parts of k" if options.blocking.splits > 1 else ""
            raise ParamError(f"areas names {named} ranks, {num_places} compute{parts}: name an area for each")
        return Partition.of_rectangles(self.problem, lambda one: Partition.of_areas(one, areas))


def _k_starts(problem: GemmProblem, splits: int, shares: Sequence[float] | None) -> list[int]:
    """Return where parts of k start, and k; those that have any come first."""
    splits = min(splits, problem.k)
    starts = starts_of(problem, problem.k, splits, None if shares is None or len(shares) > splits else shares)
    return sorted({*starts})  # a small share may come to nothing


class Prepared:
    """
    What there is to compute, by whom and in which steps; where it lies and the tasks are the core's to say.

    Attributes
    ----------
    options : ScheduleOptions
        Those asked for, with everything set.
    grid : tuple of int
        Rows and columns of ranks.
    splits : int
        Parts of k that have any.
    tile : int
        0: `kblocks` has none.
    request : KBlocksRequest
        What the core is asked for.
    """

    tile = 0

    def __init__(
        self,
        planner: Planner,
        dealt: DealtPanels,
        options: ScheduleOptions,
        how: Blocking,
        *,
        aligns: bool,
        is_open: bool = False,
    ) -> None:
        self._planner, self._dealt, self._is_open = planner, dealt, is_open
        self.grid, self.splits, self.request = dealt.grid, dealt.splits, dealt.request(how, aligns=aligns)
        named_grid = self.grid if options.areas is None else None
        known = dealt.problem.sums is not None or (how is options.blocking and named_grid == options.grid)
        self.options = options if known else changed(options, grid=named_grid, blocking=how)

    @property
    def alike(self) -> Hashable:
        """A key equal for identical schedules: k-blocks may have the same ends by other rules."""
        return _CUT(self.options), _HOW(self.options.blocking), self.request.steps_digest

    @property
    def fits(self) -> bool:
        """Whether each rank has room for its panels."""
        return all(map(operator.le, self.rank_bytes, self._planner.setting.room))

    @property
    def rank_bytes(self) -> list[int]:
        """Bytes that the panels of each rank take."""
        return _native.KBlocksLayout(self.request).rank_bytes

    def count(self, most_tasks: int) -> int:
        """Return how many tasks the schedule has, `most_tasks` + 1 if it has more; none is made."""
        return _native.KBlocksLayout(self.request).count(most_tasks)

    def schedule(self, most_tasks: int = MAX_TASKS) -> Schedule:
        """
        Return the schedule.

        Raises
        ------
        CapacityError
            If a rank has too little device memory for its panels.
        PlanError
            If there are more than so many tasks.
        """
        layout = _native.KBlocksLayout(self.request)
        self._planner.setting.check_capacity(layout.rank_bytes, least="would do with" if self._is_open else "")
        try:
            tables = layout.tables(most_tasks)
        except _native.TooManyTasksError as error:
            raise self._dealt.too_many_tasks(most_tasks) from error
        return self._schedule(tables)

    def run(self, most_tasks: int, *, keeps: bool = False) -> _native.KBlocksRun:
        """
        Return what the core makes the schedule and its simulation of, if it has no more than so many tasks.

        Parameters
        ----------
        most_tasks : int
            The limit.
        keeps : bool, optional
            Whether tasks and times are kept; who looks at few runs has them made again.
        """
        return _native.KBlocksRun(self.request, self._planner.setting.room, most_tasks, keeps)

    def schedule_of(self, run: _native.KBlocksRun) -> Schedule:
        """Return the schedule of such a run, when it is made and kept."""
        return self._schedule(run.tables())

    def _schedule(self, tables: tuple[np.ndarray, ...]) -> Schedule:
        *native, buffers = tables
        about = {"scheduler": "kblocks", "grid": self.grid, "splits": self.splits, "tile": self.tile}
        return self._planner.setting.schedule(np.frombuffer(buffers, BUFFER_DTYPE), native, **about)
