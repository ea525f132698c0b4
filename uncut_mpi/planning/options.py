"""What a caller may fix about a schedule."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any, Final, TypeVar

from uncut_mpi.errors import ParamError
from uncut_mpi.model.arguments import shown, there_are, type_text, value_of_callers
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.metrics import check_metric
from uncut_mpi.planning.option_fields import (
    BYTES,
    COLUMNS,
    COUNTS,
    NUMBER,
    NUMBERS,
    SWITCH,
    WORD,
    check,
    convert,
    declared,
    decoded,
    option,
)
from uncut_mpi.planning.others import other

ROUTINGS = ("origin", "bw", "eta")
ORDERS = ("fixed", "eta", "finish")
SEARCHED = ("uncut", "kblocks")
"""The schedulers that a search tries; what others there are is found by name (`uncut_mpi.planning.others`)."""
BLOCK_ORDERS = ("k", "columns", "corner", "k-columns")
ORDERS_BY_K = ("k", "k-columns")
DELIVERIES = ("balanced", "earliest")
BEGINS = ("first", "held")
COMBINES = ("owner", "worker")
SWEEPS = ("back", "again")
BARRIERS = ("rank", "node")
_OF_SAME_SUMS = ("same_sums", "devices", "blocking.block", "blocking.c_rows", "blocking.c_cols")
_SHARES = ("row_shares", "col_shares", "k_shares")
_OF_RINGS = ("slots", "b_slots", "c_rows", "c_cols", "c_slots", "sweep", "barrier")
_IN_RINGS: Final = operator.attrgetter(*_OF_RINGS)
IN_RINGS: Final = {"splits": 1, "rows": 1, "order": "k", "begin": "first", "combine": "worker", "away": 0}
"""The only values of options where ranks have room for some k-blocks at a time."""
_MOST_SHARES = 1e300
"""Shares are added up, and multiplied by extents."""
MAX_HOPS = 2
MOST_LANES = 64
MOST_PRODUCT_LANES = 2
MOST_TAIL = 4096
MOST_SLOTS = 1024
USUAL_SLOTS = 3
"""For so many k-blocks ranks have room, where they have none for all: one in use and two on their way."""
MOST_C_SLOTS = 2
MOST_CHUNKS = 8
MOST_BLOCKS = 4096
MOST_TRIED = 16


@value_of_callers
@dataclasses.dataclass(frozen=True, slots=True)
class Blocking:
    """
    Options of the scheduler `kblocks` (`uncut_mpi.planning.kblocks`); 0 and "" leave the choice open.

    Of a C stored by rows, rows stand for columns and A for B in what is said of orders.

    Attributes
    ----------
    splits : int
        Ranks that share k, besides the process grid: grid rows x grid columns x splits compute. Left open: 1, or
        all ranks where k is 8 times m and n.
    first : int
        Elements of the first k-block. Left open: 256.
    block : int
        Elements of the largest k-block. Left open: 2048, of half types 8192.
    growth : int
        How many times as far as the one before it a k-block ends. Left open: 2.
    columns : int
        Equal column blocks in which a rank hands its C on; the last of several is halved twice. Of a C stored by
        rows they are row blocks, except in the order "corner". Left open: 4.
    rows : int
        Row blocks of the order "corner", cut as the column blocks are; 1 in the others. Left open: as many as
        column blocks.
    order : "k" or "columns" or "corner" or "k-columns"
        "k": k-blocks over all columns, those of the end of k by column blocks (tail). "k-columns": the same, and
        of the end A's part arrives whole and B's by column blocks. "columns": one column block after the other.
        "corner": a first block, then with each column block or row block that arrives all that it makes with
        those before it, over all of k at once. Left open: "k", of a C in host memory "columns", with several row
        blocks "corner".
    lanes : int
        How many products a rank may have begun: of two blocks of C, one begins as the other runs out of work for
        all multiprocessors. Left open: 2.
    delivery : "balanced" or "earliest"
        How pieces of A and B on devices reach the ranks that need them. "balanced": every rank takes a slice and
        hands it on. Where devices serve their copies one after another, whoever has least to send in all takes
        the whole piece, and what is handed on goes before what one rank needs. "earliest": whole pieces by list
        scheduling. The copy that can begin first, as its sender and its receiver have no other, is next, and
        whoever has a piece may hand it on. Left open: "balanced", where links between devices differ "earliest".
    begin : "first" or "held"
        Where ranks begin. "first": all with the first elements of k and the first block of C, and what a rank
        holds of A or B in part it copies beside the rest. "held": each with what its device holds of A or B in
        part, which it reads in place. That is some of k, or all of k for some rows or columns of C, if blocks of
        C come one after the other. Then it goes on from there, past the end to the start, so that each holder
        serves one rank at a time. Left open: "held" where A or B is in parts and all of them are on devices.
    combine : "owner" or "worker"
        Where a C on a device meets the products. In host memory always "worker". Left open: "owner".
    away : int
        How many of the last column blocks meet a C on a device where they are computed, though the others do at
        its owner. The halves of the last one count apart; all do if there are no more. At the end the owner's
        device would have all sums to form at once. Left open: none, and a search tries some numbers unless
        combine is set.
    tail : int
        In the orders by k the last 1/tail of k goes by column blocks; 0 in the others. Left open: 4, in
        "k-columns" 2 unless ranks share k.
    slots : int
        For how many k-blocks of A, and of B, a rank has room. With more than one the next k-blocks arrive while
        one is multiplied. Left open: for all, unless its memory is too small for it; 3 with c_rows, c_cols or
        c_slots.
    c_rows : int
        Rows of C that a rank forms at a time: its part of C is cut into equal blocks. Left open: all that it has
        room for.
    c_cols : int
        The same of columns.
    c_slots : int
        For how many blocks of C a rank has room. With two it begins the next one while one leaves. Left open: 1.
    """

    splits: int = option(NUMBER, "kblocks", default=0)
    first: int = option(NUMBER, "kblocks", default=0)
    block: int = option(NUMBER, "kblocks", default=0)
    growth: int = option(NUMBER, "kblocks", default=0, least=2)
    columns: int = option(NUMBER, "kblocks", default=0, most=MOST_BLOCKS)
    rows: int = option(NUMBER, "kblocks", default=0, most=MOST_BLOCKS)
    order: str = option(WORD, "kblocks", default="", words=BLOCK_ORDERS)
    lanes: int = option(NUMBER, "kblocks", default=0, most=MOST_PRODUCT_LANES)
    delivery: str = option(WORD, "kblocks", default="", words=DELIVERIES)
    begin: str = option(WORD, "kblocks", default="", words=BEGINS)
    combine: str = option(WORD, "kblocks", default="", words=COMBINES)
    away: int = option(NUMBER, "kblocks", default=0)
    tail: int = option(NUMBER, "kblocks", default=0, most=MOST_TAIL)
    slots: int = option(NUMBER, "kblocks", default=0, most=MOST_SLOTS)
    # Those of B, where it is another number.
    b_slots: int = option(NUMBER, "kblocks", default=0, most=MOST_SLOTS, hidden=True)
    c_rows: int = option(NUMBER, "kblocks", default=0)
    c_cols: int = option(NUMBER, "kblocks", default=0)
    c_slots: int = option(NUMBER, "kblocks", default=0, most=MOST_C_SLOTS)
    # The order of blocks of C, and of the k-blocks of each. "back": there and back, so that what two blocks in
    # a row share need not come again. "again": rows first, each time from the first. Left open: "back".
    sweep: str = option(WORD, "kblocks", default="", words=SWEEPS, hidden=True)
    # Whose products have to be over before a slot takes its next k-block: the rank's own, or those of all ranks of its
    # node, as in PaRSEC's product. Left open: "rank".
    barrier: str = option(WORD, "kblocks", default="", words=BARRIERS, hidden=True)

    def __post_init__(self) -> None:
        convert(self)
        check(self, "blocking.", " of kblocks")
        if self.block and self.first > self.block:
            raise ParamError(
                f"the first k-block shall have {self.first} elements (first) and the largest {self.block} "
                "(block): let the first be no longer"
            )
        if self.tail and (self.rows > 1 or self.order not in ("", *ORDERS_BY_K)):
            other = f"the order {self.order!r}" if self.order not in ("", *ORDERS_BY_K) else f"{self.rows} row blocks"
            raise ParamError(
                f"the last 1/{self.tail} of k by column blocks (tail) is for the orders "
                f"{' and '.join(ORDERS_BY_K)}, not for {other}: leave one of the two out"
            )
        if self.rows > 1 and self.order not in ("", "corner"):
            raise ParamError(
                f"{self.rows} row blocks (rows) are for the order 'corner', not for "
                f"{self.order!r}: leave one of the two out"
            )
        if self.in_rings and not self.may_be_in_rings:
            name = next(name for name, only in IN_RINGS.items() if getattr(self, name) not in (0, "", only))
            given = self.rings_given[0]
            raise ParamError(
                f"{given} = {getattr(self, given)}, for ranks that have not room for all, goes with {name} = "
                f"{IN_RINGS[name]!r}, not with {getattr(self, name)!r}: leave one of the two out"
            )
        if self.away and self.combine == "worker":
            raise ParamError(
                f"the last {self.away} column blocks shall be combined where they are computed (away), "
                "but with combine = 'worker' (of blocking) all are: leave one of the two out"
            )

    @property
    def in_rings(self) -> bool:
        """Whether ranks have room for some k-blocks at a time."""
        return any(_IN_RINGS(self))  # which a search asks all the time

    @property
    def may_be_in_rings(self) -> bool:
        """Whether ranks may do so, where memory is short."""
        return all(getattr(self, name) in (0, "", only) for name, only in IN_RINGS.items())

    @property
    def rings_given(self) -> tuple[str, ...]:
        """Which options are set that say how ranks do with room for some k-blocks and blocks of C at a time."""
        return tuple(name for name in _OF_RINGS if getattr(self, name))

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left open but what follows from the rest."""
        numbers = self.splits and self.first and self.block and self.growth and self.columns and self.rows
        words = self.order and self.delivery and self.begin and self.combine
        return bool(numbers and self.lanes and words)


@value_of_callers
@dataclasses.dataclass(frozen=True, slots=True)
class ScheduleOptions:
    """
    Options of the planner; None and 0 leave the choice open.

    Attributes
    ----------
    scheduler : str, default auto
        "uncut": the schedule of the Uncut-GEMMs paper with its heuristics. "kblocks": few large products per
        rank. "auto": a search by simulation, among these two, chooses what is not fixed below. Or the name of
        another one that is installed (`uncut_mpi.planning.others`): those of other papers come with the
        benchmarks.
    tile : int
        Tile edge T (elements), cut to the largest extent of a block. Left open: the heuristic of the scheduler's
        paper, in Uncut-GEMMs section III-A.
    grid : tuple of int
        Process grid, rows and columns; rows x columns is at most the ranks that compute. Left open: all ranks, as
        square as can be, with no more rows than columns; kblocks between host matrices: up to 32 ranks a row.
    devices : tuple of int
        Ranks that compute, in the order in which they fill the grid, row by row. The others may still own
        matrices, issue copies and forward tiles. A C on a device that is only scaled is scaled there, whoever
        computes. Left open: all ranks in order.
    row_shares : tuple of float
        What each grid row gets of m, as positive numbers of any sum; whole numbers whose sum is m are just so
        many rows. Left open: equal blocks.
    col_shares : tuple of float
        The same for each grid column, of n.
    k_shares : tuple of float
        The same for each part of k, as many as blocking.splits says, if that says anything.
    areas : tuple of tuple of float
        Instead of a grid: columns of ranks, each cut into rows of its own. For each column what each of its ranks
        gets of C, from top to bottom, as positive numbers of any sum; ranks fill them column by column. Of a C
        stored by rows they are rows of ranks, each cut into columns of its own, from left to right. With k split
        there are areas for the ranks of one part of k.
    chunks : int
        Chunks p of a batched fetch (section III-E; 8 in the paper). A chain of d hops takes 1 + (d - 1)/p times
        one, and each chunk has a flag and a wait of its own. Left open: two for each destination but the first,
        at most 8, so that no more than half a hop is lost.
    routing : "origin" or "bw" or "eta", default eta
        Where a tile is fetched from. "origin": its owner. "bw": the holder with the fastest link (III-D1). "eta":
        the one from which it arrives first (III-D2).
    batch : bool, default True
        Fetch a read-only tile once for all ranks that need it, in chunks passed from rank to rank (III-E). With
        routing "origin" along the ranks in order, else along the best chain found.
    max_hops : int
        Most ranks that a tile may be relayed over, where a chain of links is faster than the link to its
        destination; routing "origin" never does. The relays keep the copies that they pass on. Left open: 1, as
        PARALiA re-routes.
    wr_lazy : bool, default True
        Fetch C at the end where A or B shares its location (III-F).
    order : "fixed" or "eta" or "finish", default eta
        How the next sub-problem of a rank is chosen (III-G1). "fixed": k innermost, then rows, then columns.
        "eta": the one that can start first. "finish": the same, but of those that can start at one time rather
        one whose C tile is begun.
    device_memory : int or str, as "16GiB"
        What a rank may use of its device's memory beside the matrices there (bytes). What does not fit is
        computed one block of C after the other. Left open: in a session four fifths of what is free, for plan all
        of the device.
    host_memory : int or str, as "16GiB"
        What a rank may use of host memory for copies of matrices that no device reaches (bytes). Those lie in
        files, or in private memory that cannot be page-locked. Left open: as much as they take; for files a part
        of what is free, which plan and gemm say.
    tune : int
        With "auto": how many of the schedules that the search found are tried, in turns, by the first calls of a
        plan (four each), after which it keeps the fastest. 0 and 1 take the search's choice. Sums of k are then
        added in another order from call to call until the choice is made.
    search : "rule" or "full"
        How far the search of auto goes. "rule": a few schedules, which takes about a millisecond. "full": as long as it
        is worth a tenth of a second. Left open: `Session.gemm` begins by rule. It looks further when a product was
        called so often that this takes a tenth of the time of all calls. `Session.plan` and plan look at once.
    same_sums : bool
        Make C the same in every bit on any number of ranks, wherever A, B and C are and however they are dealt. Its
        tiles, and the k-blocks that are summed, have sizes that depend on m, n, k and types alone. Or blocking says
        them (c_rows, c_cols, and block in multiples of 256). Products take longer, and a host multiplies with one
        thread a rank. It holds for devices of one kind and libraries of one version, and for one product: no batch,
        no triangle, no matrix of which one triangle is read. What is stored by rows, and what is transposed, has to be
        the same too.
    metric : str, default time
        What the search of auto minimises. "time": the time of a call. "pdp": the energy of all devices meanwhile,
        idle ones too. "edp": that energy times the time. All but the first need a machine whose watts are known.

    Notes
    -----
    Rows and columns are those of the caller's C, in whatever order it is stored. `areas` and most orders of blocks cut
    C into strips, which follow its storage: whole columns of an F-order C, whole rows of a C-order one. `blocking`
    (`Blocking`) is what `kblocks` alone takes.
    """

    scheduler: str = option(WORD, default="auto")
    tile: int = option(NUMBER, "uncut", default=0)
    grid: tuple[int, int] | None = option(COUNTS, "uncut", "kblocks")
    devices: tuple[int, ...] | None = option(COUNTS, "uncut", "kblocks")
    row_shares: tuple[float, ...] | None = option(NUMBERS, "uncut", "kblocks")
    col_shares: tuple[float, ...] | None = option(NUMBERS, "uncut", "kblocks")
    k_shares: tuple[float, ...] | None = option(NUMBERS, "kblocks")
    areas: tuple[tuple[float, ...], ...] | None = option(COLUMNS, "kblocks")
    chunks: int | None = option(NUMBER, "uncut", least=1)
    # Smallest chunk of a batched fetch (bytes); 1: by columns alone, as the authors' library cuts.
    min_chunk_bytes: int | None = option(NUMBER, "uncut", least=1, hidden=True)
    # Compute lanes per rank (section III-B).
    compute_lanes: int = option(NUMBER, "uncut", default=8, least=1, most=MOST_LANES, hidden=True)
    # Keep fetched tiles for later sub-problems (III-C). Without it every sub-problem fetches its tiles anew: no
    # copy is kept, so there is nothing to route from, to batch for or to order by, and routing, batch and order
    # are as if "origin", off and "fixed".
    caching: bool = option(SWITCH, "uncut", default=True, hidden=True)
    # Lanes of their own per (source, destination) and for compute (III-B). Without it each rank does everything
    # on one lane.
    overlap: bool = option(SWITCH, "uncut", default=True, hidden=True)
    routing: str = option(WORD, "uncut", default="eta", words=ROUTINGS)
    batch: bool = option(SWITCH, "uncut", default=True)
    max_hops: int | None = option(NUMBER, "uncut", most=MAX_HOPS)
    wr_lazy: bool = option(SWITCH, "uncut", default=True)
    order: str = option(WORD, "uncut", default="eta", words=ORDERS)
    device_memory: int = option(BYTES, default=0)
    host_memory: int = option(BYTES, default=0)
    blocking: Blocking = Blocking()
    tune: int = option(NUMBER, default=0, most=MOST_TRIED)
    search: str = option(WORD, default="", words=("rule", "full"))
    same_sums: bool = option(SWITCH, "kblocks", default=False)
    metric: str = option(WORD, default="time")

    @classmethod
    def decoded(cls, values: object, whose: str = "options") -> ScheduleOptions:
        """
        Return options from plain values by name, as JSON has them; those of `Blocking` under ``"blocking"``.

        Raises
        ------
        ParamError
            If a name is unknown, or a value is none that the option may have.
        """
        made: ScheduleOptions = decoded(cls, values, {"blocking": Blocking}, whose)
        return made

    def oriented(self, problem: GemmProblem) -> ScheduleOptions:
        """
        Return options of the caller's C as those of a problem's C, and the other way round.

        A C stored by rows is transposed in its problem, so rows and columns change places. That is so of the grid, its
        shares, the blocks of C that are formed one after the other, and those of the order ``"corner"``. Ranks still
        fill the caller's grid row by row (`uncut_mpi.planning.grid`). Strips, in which the other orders of blocks and
        `areas` cut C, follow its storage in both.
        """
        if not problem.swapped:
            return self
        blocking = self.blocking
        if blocking.order == "corner" or blocking.rows > 1:
            blocking = changed(blocking, order="corner", rows=blocking.columns, columns=blocking.rows)
        if blocking.c_rows != blocking.c_cols:
            blocking = changed(blocking, c_rows=blocking.c_cols, c_cols=blocking.c_rows)
        if blocking.b_slots:
            blocking = changed(blocking, slots=blocking.b_slots, b_slots=blocking.slots or USUAL_SLOTS)
        grid = self.grid and self.grid[::-1]
        return changed(self, grid=grid, row_shares=self.col_shares, col_shares=self.row_shares, blocking=blocking)

    def computing_ranks(self, num_ranks: int) -> tuple[int, ...]:
        """
        Return the ranks that compute, of so many that there are, in grid order.

        Raises
        ------
        ParamError
            If `devices` names one that there is not.
        """
        if self.devices is None:
            return tuple(range(num_ranks))
        if max(self.devices) >= num_ranks:
            raise ParamError(
                f"rank {max(self.devices)} shall compute (devices, --compute-ranks), "
                f"but {there_are(num_ranks, 'rank')} (0 to {num_ranks - 1}): start more ranks or leave it out"
            )
        return self.devices

    @property
    def most_chunks(self) -> int:
        """Chunks of a fetch at most."""
        return MOST_CHUNKS if self.chunks is None else self.chunks

    def schedulers(self) -> tuple[str, ...]:
        """
        Return the schedulers that these options leave to choose from.

        ``"auto"`` leaves out those that do not take all that was given.

        Raises
        ------
        ParamError
            If there is none.
        """
        asked = SEARCHED if self.scheduler == "auto" else (self.scheduler,)
        left = tuple(one for one in asked if not self.foreign(one))
        if not left:
            if self.scheduler == "auto":
                raise ParamError(f"no scheduler takes all of {', '.join(self.given)}: leave some of them out")
            raise ParamError(
                f"scheduler {self.scheduler} does not take {', '.join(self.foreign(self.scheduler))}: leave that out"
            )
        return left

    @property
    def given(self) -> tuple[str, ...]:
        """Names of what was said of the schedule itself: all that differs from its default, `Blocking` included."""
        names = [name for name, default in _DEFAULTS.items() if getattr(self, name) != default]
        if self.blocking != _NO_BLOCKING:
            names += [f"blocking.{name}" for name, _ in declared(self.blocking) if getattr(self.blocking, name)]
        return tuple(names)

    def foreign(self, scheduler: str) -> tuple[str, ...]:
        """Return the names of the given options that a scheduler does not take."""
        if scheduler in SEARCHED:
            return tuple(name for name in self.given if scheduler not in _TAKERS[name])
        takes = other(scheduler).takes
        return tuple(name for name in self.given if name not in takes)

    @property
    def of_its_scheduler(self) -> ScheduleOptions:
        """The same without what its scheduler finds by its own rules and does not take: it gives the same schedule."""
        dropped = self.foreign(self.scheduler)
        own = {name: about.default for name, about in declared(self) if name in dropped}
        kept = {
            name: getattr(self.blocking, name)
            for name, _ in declared(self.blocking)
            if f"blocking.{name}" not in dropped
        }
        return dataclasses.replace(self, **own, blocking=Blocking(**kept))

    def __post_init__(self) -> None:
        convert(self)
        if self.grid is not None and len(self.grid) != 2:
            raise ParamError(f"grid = {shown(self.grid)} has {len(self.grid)} numbers: pass two, rows and columns")
        if not isinstance(self.blocking, Blocking):
            raise ParamError(f"blocking = {shown(self.blocking)} is {type_text(self.blocking)}: pass a Blocking")
        check(self)
        if self.scheduler not in (*SEARCHED, "auto"):
            other(self.scheduler)
        check_metric(self.metric)
        for name, is_set, why in (
            ("tune", self.tune > 1, "it tries what a search finds"),
            ("metric", self.metric != "time", "a search minimises it"),
            ("search", bool(self.search), "it says how far a search goes"),
        ):
            if is_set and self.scheduler != "auto":
                raise ParamError(
                    f"{name} = {getattr(self, name)!r} with scheduler {self.scheduler!r}: {why}, so take "
                    f"scheduler='auto', or leave {name} out"
                )
        if self.metric != "time" and self.tune > 1:
            raise ParamError(
                f"metric = {self.metric!r} with tune = {self.tune}, which keeps the fastest of what it tries: "
                "leave one of them out"
            )
        if self.same_sums:
            others = [name for name in self.given if name not in _OF_SAME_SUMS]
            others += ["tune"] * (self.tune > 1) + ["search"] * bool(self.search)
            others += ["metric"] * (self.metric != "time")
            if others:
                raise ParamError(
                    f"same_sums, for which C and k are cut in one way, goes without {', '.join(others)}: leave "
                    f"{'that' if len(others) == 1 else 'those'} out"
                )
        if self.grid is not None and min(self.grid) < 1:
            raise ParamError(f"grid {self.grid[0]}x{self.grid[1]} has an extent below 1")
        if self.devices is not None:
            _check_devices(self.devices)
        for name in _SHARES:
            shares = getattr(self, name)
            if shares is not None and not (shares and _are_shares(shares)):
                raise ParamError(
                    f"{name} = {shares} are not all positive numbers, {_MOST_SHARES:g} at most in all: name one for "
                    "each block, or none"
                )
        splits = self.blocking.splits
        if self.k_shares is not None and splits not in (0, len(self.k_shares)):
            raise ParamError(
                f"{len(self.k_shares)} k_shares were given for {splits} parts of k (blocking.splits): name one for each"
            )
        if self.areas is not None:
            self._check_areas(self.areas)
        for name in ("areas", "k_shares"):
            if self.blocking.in_rings and getattr(self, name) is not None:
                raise ParamError(
                    f"{name} with blocking.{self.blocking.rings_given[0]}: where ranks have not room for all they form "
                    "blocks of a process grid, and each has all of k; leave one of the two out"
                )

    def _check_areas(self, areas: tuple[tuple[float, ...], ...]) -> None:
        if not (areas and all(areas) and _are_shares([one for column in areas for one in column])):
            raise ParamError(
                f"areas = {areas} are not all positive numbers, {_MOST_SHARES:g} at most in all: name one for each "
                "rank of every column, or none"
            )
        if (self.grid, self.row_shares, self.col_shares) != (None, None, None):
            raise ParamError(
                "areas cut C by columns of ranks, grid, row_shares and col_shares by a process grid: give one of both"
            )


def changed(options: _Options, /, **changes: Any) -> _Options:
    """
    Return options with some values changed to others that are known to be valid.

    As `dataclasses.replace`, without its checks, in a fifth to half of the time: a search does so a thousand times.
    """
    kind = type(options)
    made = object.__new__(kind)
    setters = _SETTERS[kind]
    for set_value, value in zip(setters.values(), _GETTERS[kind](options), strict=True):
        set_value(made, value)
    for name, value in changes.items():
        setters[name](made, value)
    return made


def _are_shares(values: Sequence[float]) -> bool:
    return all(math.isfinite(one) and one > 0 for one in values) and sum(values) <= _MOST_SHARES


def _check_devices(devices: tuple[int, ...]) -> None:
    if not devices:
        raise ParamError("devices names no rank that computes: name at least one, or None for all ranks")
    if min(devices) < 0:
        raise ParamError(f"rank {min(devices)} cannot compute (devices): ranks count from 0")
    if len({*devices}) < len(devices):
        twice = sorted({rank for rank in devices if devices.count(rank) > 1})
        raise ParamError(f"rank {twice[0]} is named twice among those that compute (devices): name it once")


_DEFAULTS: Final = {name: about.default for name, about in declared(ScheduleOptions) if about.takers}
_NO_BLOCKING: Final = Blocking()
_TAKERS: Final = {
    **{name: about.takers for name, about in declared(ScheduleOptions)},
    **{f"blocking.{name}": about.takers for name, about in declared(Blocking)},
}
_Options = TypeVar("_Options", Blocking, ScheduleOptions)
_NAMES: Final = {kind: [one.name for one in dataclasses.fields(kind)] for kind in (Blocking, ScheduleOptions)}
# Slots are written through their descriptors: the classes themselves are frozen.
_SETTERS: Final = {kind: {name: vars(kind)[name].__set__ for name in names} for kind, names in _NAMES.items()}
_GETTERS: Final = {kind: operator.attrgetter(*names) for kind, names in _NAMES.items()}
