"""What a caller may fix about a schedule."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from uncut_mpi.errors import ParamError
from uncut_mpi.model.arguments import count, flag, items, real_number, shown, there_are, type_text, word
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.metrics import check_metric
from uncut_mpi.planning.option_fields import check, choice, declared, number

ROUTINGS = ("origin", "bw", "eta")
ORDERS = ("fixed", "eta", "finish")
SCHEDULERS = ("uncut", "kblocks", "cyclic", "bands", "auto")
DISTRIBUTIONS = ("2d-cyclic", "1d-cyclic", "round-robin", "sequential")
BLOCK_ORDERS = ("k", "columns", "corner", "k-columns")
ORDERS_BY_K = ("k", "k-columns")
DELIVERIES = ("balanced", "earliest")
BEGINS = ("first", "held")
COMBINES = ("owner", "worker")
_BLOCKS = ("grid", "devices", "row_shares", "col_shares")
_SHARES = ("row_shares", "col_shares", "k_shares")
_MOST_SHARES = 1e300
"""Shares are added up, and multiplied by extents."""
MAX_HOPS = 2
MOST_PRODUCT_LANES = 2
MOST_MULTIPLE = 4096
MOST_TAIL = 4096
MOST_CHUNKS = 8
MOST_BLOCKS = 4096
MOST_TRIED = 16


_SMALL: Final = 1 << 62


def _convert(options: object, kinds: Mapping[str, Callable[[str, object], Any]]) -> None:
    """Turn what was given into Python's own values once, so that equal options compare, hash and print equally."""
    for name, convert in kinds.items():
        value = getattr(options, name)
        kind = type(value)
        if (kind is bool and convert is flag) or (kind is str and convert is word):
            continue  # as it mostly is: a search makes hundreds of options
        if kind is int and convert is count and -_SMALL < value < _SMALL:
            continue
        if value is not None or name not in _MAY_BE_NONE:
            object.__setattr__(options, name, convert(name, value))


def _tries(name: str, value: object) -> int:
    try:
        return count(name, value)
    except ParamError:
        raise ParamError(f"{name} = {shown(value)} is not a whole number from 0 to {MOST_TRIED}") from None


def _counts(name: str, value: object) -> tuple[int, ...]:
    return tuple(count(f"{name}[{at}]", one) for at, one in enumerate(items(name, value)))


def _numbers(name: str, value: object) -> tuple[float, ...]:
    return tuple(real_number(f"{name}[{at}]", one) for at, one in enumerate(items(name, value)))


def _columns(name: str, value: object) -> tuple[tuple[float, ...], ...]:
    return tuple(_numbers(f"{name}[{at}]", one) for at, one in enumerate(items(name, value)))


_SCHEDULE: Final[Mapping[str, Callable[[str, object], Any]]] = {
    **dict.fromkeys(("tile", "tile_min", "chunks", "min_chunk_bytes", "compute_lanes", "max_hops"), count),
    **dict.fromkeys(("caching", "overlap", "batch", "wr_lazy"), flag),
    **dict.fromkeys(("scheduler", "routing", "order", "distribution", "metric"), word),
    **dict.fromkeys(("grid", "devices"), _counts),
    **dict.fromkeys(_SHARES, _numbers),
    "areas": _columns,
    "tune": _tries,
}
_MAY_BE_NONE: Final = {"grid", "devices", *_SHARES, "areas", "chunks", "min_chunk_bytes", "max_hops"}


@dataclasses.dataclass(frozen=True, slots=True)
class Blocking:
    """
    Options of the scheduler `kblocks` (`uncut_mpi.planning.kblocks`); 0 and "" leave the choice open.

    Attributes
    ----------
    splits : int
        Ranks that share k, besides the process grid: grid rows × grid columns × splits compute.
    first : int
        Elements of the first k-block.
    block : int
        Elements of the largest k-block.
    growth : int
        How many times as far as the one before it a k-block ends, at least 2.
    columns : int
        Equal column blocks in which a rank hands its C on; the last of several is halved twice. Of a C stored by rows
        they are row blocks, except in the order ``"corner"``.
    rows : int
        Row blocks of the order ``"corner"``, cut as the column blocks are; 1 in the others.
    order : str
        Of a C stored by rows, rows stand for columns and A for B in what follows.
        ``"k"``: k-blocks over all columns, those of the end of k by column blocks (`tail`). ``"k-columns"``: the same,
        and B's part of the end arrives by column blocks too. ``"columns"``: one column block after the other.
        ``"corner"``: a first block, then with each column block or row block that arrives all that it makes with those
        before it, over all of k at once. A C on another device than its products is added to by these where it is
        combined there (`combine`, `away`), else summed apart.
    lanes : int
        How many products a rank may have begun, 1 or 2: of two blocks of C, one begins as the other runs out of work
        for all multiprocessors.
    delivery : str
        How pieces of A and B on devices reach the ranks that need them. ``"balanced"``: every rank takes a slice and
        hands it on; where devices serve their copies one after another, whoever has least to send in all takes the
        whole piece, and what is handed on goes before what one rank needs. ``"earliest"``: whole pieces by list
        scheduling: the copy that can begin first, as its sender and its receiver have no other, is next, and whoever
        has a piece may hand it on.
    begin : str
        Where ranks begin along k. ``"first"``: all with its first elements, and what a rank holds of A or B in part it
        copies beside the rest. ``"held"``: each with what its device holds of A or B in part, which it reads in place;
        then it goes on from there, past the end of k to its start, so that each holder serves one rank at a time.
    combine : str
        Where a C on a device meets the products: ``"owner"`` or ``"worker"``. In host memory always the latter.
    away : int
        How many of the last column blocks, the halves of the last one counted apart, meet a C on a device where they
        are computed though the others do at its owner; all if there are no more. At the end the owner's device would
        have all sums to form at once. A search tries some numbers unless this or `combine` is set.
    multiple : int
        Row and column blocks begin at multiples of so many elements from the start of a rank's part, a power of two,
        where equal blocks have four times as many; else of half of it, and so on. 1: of 16 bytes alone. A search
        tries 1, 64 and 256 for what it has chosen. Products of whole multiples of what a
        library's kernels compute at a time are faster, equal blocks are handed on more evenly.
    tail : int
        In the orders by k the last 1/`tail` of k goes by column blocks. 0 in the others, and where it is left to the
        order: a quarter, in ``"k-columns"`` a half unless ranks share k.
    """

    splits: int = number(
        "--splits",
        "S",
        "ranks that share k, R x C x S compute; default: 1, or all ranks where k is 8 times m and n",
    )
    first: int = number("--k-first", "K", "elements of the first k-block; default 256")
    block: int = number("--k-block", "K", "elements of the largest k-block; default 2048, 8192 for halves")
    growth: int = number("--k-growth", "G", "a k-block ends G times as far as the one before it; default 2", least=2)
    columns: int = number("--column-blocks", "N", "blocks in which C is handed on; default 4", most=MOST_BLOCKS)
    rows: int = number(
        "--row-blocks",
        "N",
        "row blocks of the block order corner, which more than one asks for; the last of several is halved twice; "
        "default: as many as column blocks",
        most=MOST_BLOCKS,
    )
    order: str = choice(
        "--block-order",
        BLOCK_ORDERS,
        "k: k-blocks over all columns; columns: one column block after the other; corner: row blocks and column "
        "blocks as they arrive; k-columns: as k, the last k-blocks by column blocks as these arrive; default k, for a "
        "C in host memory columns, with --row-blocks corner",
    )
    lanes: int = number(
        "--product-lanes",
        "N",
        "how many products a rank may have begun, 1 or 2; default 2",
        most=MOST_PRODUCT_LANES,
    )
    delivery: str = choice(
        "--delivery",
        DELIVERIES,
        "how pieces of A and B on devices are handed around: everybody sends as much, or whole pieces, each copy "
        "as soon as its sender and its receiver are free; default balanced",
    )
    begin: str = choice(
        "--k-begin",
        BEGINS,
        "where ranks begin along k: all with the first elements, or each with what it holds of a matrix in parts; "
        "default first, a search tries both",
    )
    combine: str = choice("--combine", COMBINES, "where a C on a device meets the products; default owner")
    away: int = number(
        "--combine-away",
        "N",
        "of a C on a device that is combined at its owner the last N column blocks (there are two more than "
        "--column-blocks, the last being halved twice) are combined where they are computed; default 0, a search tries "
        "some numbers unless --combine or this is given",
        least=0,
    )
    multiple: int = number(
        "--block-multiple",
        "N",
        "row and column blocks of a rank's part begin at multiples of N elements, a power of two, where they have "
        "four times as many, else of half of it, and so on; default 1: of 16 bytes, a search tries 64 and 256 too",
        most=MOST_MULTIPLE,
    )
    tail: int = number(
        "--k-tail",
        "N",
        "in the block orders k and k-columns the last 1/N of k goes by column blocks; default 4, of k-columns 2 "
        "unless ranks share k",
        most=MOST_TAIL,
    )

    def __post_init__(self) -> None:
        _convert(self, _BLOCKING)
        if self.multiple and (not 1 <= self.multiple <= MOST_MULTIPLE or self.multiple & (self.multiple - 1)):
            raise ParamError(
                f"multiple = {self.multiple} (--block-multiple): use a power of two from 1 to {MOST_MULTIPLE}"
            )
        check(self, "kblocks")
        if self.block and self.first > self.block:
            raise ParamError(
                f"the first k-block shall have {self.first} elements (first, --k-first) and the largest {self.block} "
                "(block, --k-block): let the first be no longer"
            )
        if self.tail and (self.rows > 1 or self.order not in ("", *ORDERS_BY_K)):
            other = f"the order {self.order!r}" if self.order not in ("", *ORDERS_BY_K) else f"{self.rows} row blocks"
            raise ParamError(
                f"the last 1/{self.tail} of k by column blocks (tail, --k-tail) is for the orders "
                f"{' and '.join(ORDERS_BY_K)} (--block-order), not for {other}: leave one of the two out"
            )
        if self.rows > 1 and self.order not in ("", "corner"):
            raise ParamError(
                f"{self.rows} row blocks (rows, --row-blocks) are for the order 'corner' (--block-order), not for "
                f"{self.order!r}: leave one of the two out"
            )
        if self.away and self.combine == "worker":
            raise ParamError(
                f"the last {self.away} column blocks shall be combined where they are computed (away, "
                "--combine-away), but with combine = 'worker' (--combine) all are: leave one of the two out"
            )

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left open but what follows from the rest."""
        numbers = self.splits and self.first and self.block and self.growth and self.columns and self.rows
        words = self.order and self.delivery and self.begin and self.combine
        return bool(numbers and self.multiple and self.lanes and words)


_BLOCKING: Final[Mapping[str, Callable[[str, object], Any]]] = {
    name: word if about.words else count for name, about in declared(Blocking)
}
_TAKES: Final = {
    "uncut": {
        *_BLOCKS,
        "tile",
        "tile_min",
        "chunks",
        "min_chunk_bytes",
        "compute_lanes",
        "caching",
        "overlap",
        "routing",
        "batch",
        "max_hops",
        "wr_lazy",
        "order",
    },
    "kblocks": {*_BLOCKS, "k_shares", "areas", *(f"blocking.{name}" for name in _BLOCKING)},
    "cyclic": {*_BLOCKS, "tile", "max_hops", "compute_lanes", "distribution"},
    "bands": {"devices", "tile"},
}
"""The options that each scheduler takes."""


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduleOptions:
    """
    Options of the planner.

    Attributes
    ----------
    scheduler : str
        ``"uncut"``, the schedule of the Uncut-GEMMs paper with its heuristics; ``"kblocks"``, few large
        products per rank; ``"cyclic"``, PARALiA's; ``"bands"``, Choi's, between devices only; ``"auto"`` lets a
        search by simulation choose what is not fixed below (`uncut_mpi.planning.search`).
    tile : int
        Tile edge T in elements, cut to the largest extent of a block; 0 lets the heuristic of section
        III-A choose.
    tile_min : int
        T_min of the latency term of that heuristic.
    grid : tuple of int or None
        Process grid (rows, cols) with rows × cols at most the ranks that compute; None chooses.
    devices : tuple of int or None
        Ranks that compute, in the order in which they fill the grid, row by row; None: all ranks in
        order. The others may still own matrices, issue copies and forward tiles. A C that is only
        scaled is scaled by its owner, whoever computes.
    row_shares, col_shares : tuple of float or None
        What each grid row and grid column gets of m and of n, as positive numbers of any sum; whole numbers whose sum
        is m or n are just so many rows or columns. None: equal blocks. See `uncut_mpi.planning.shares`.
    k_shares : tuple of float or None
        The same for each part of k, as many as `Blocking.splits` says, if that says anything.
    areas : tuple of tuple of float or None
        Instead of a grid: columns of ranks, each cut into rows of its own (`uncut_mpi.planning.partition`). For each
        column what each of its ranks gets of C, from top to bottom, as positive numbers of any sum; ranks fill them
        column by column. Of a C stored by rows they are rows of ranks, each cut into columns of its own, from left to
        right. With k split there are areas for the ranks of one part of k.
    chunks : int or None
        Chunks p of a batched fetch (section III-E; 8 in the paper). None: two for each destination but the first,
        at most 8. A chain of d hops takes 1 + (d - 1)/p times one, so that no more than half a hop is lost, and each
        chunk has a flag and a wait of its own.
    min_chunk_bytes : int or None
        Smallest chunk of a batched fetch; None: 256 KiB, below which a copy's fixed cost outweighs what it
        moves. The authors' library cuts by columns alone, as 1 does.
    compute_lanes : int
        Compute lanes per rank (section III-B).
    caching : bool
        Keep fetched tiles for later sub-problems (III-C). Without it every sub-problem fetches its
        tiles anew: no copy is kept, so there is nothing to route from, to batch for or to order by,
        and `routing`, `batch` and `order` are as if ``"origin"``, off and ``"fixed"``.
    overlap : bool
        Lanes of their own per (source, destination) and for compute (III-B). Without it each rank
        does everything on one lane.
    routing : str
        ``"origin"``, ``"bw"`` (III-D1) or ``"eta"`` (III-D2).
    batch : bool
        Fetch a read-only tile once for all ranks that need it, in chunks passed from rank to rank
        (III-E). With routing ``"origin"`` along the ranks in order, else along the best chain found.
    max_hops : int or None
        Most ranks that a tile may be relayed over, 0 to 2, where a chain of links is faster than the
        link to its destination; routing ``"origin"`` never does. The relays keep the copies that
        they pass on. None: 1, as PARALiA re-routes; 0 for `cyclic` with a matrix in host memory.
    wr_lazy : bool
        Fetch C at the end where A or B shares its location (III-F); of no effect elsewhere.
    order : str
        How the next sub-problem of a rank is chosen (III-G1): ``"fixed"``, k innermost, then rows, then
        columns; ``"eta"``, the one that can start first; ``"finish"``, the same, but of those that can
        start at one time rather one whose C tile is begun.
    distribution : str
        How `cyclic` deals tiles of C out: ``"2d-cyclic"``, ``"1d-cyclic"`` (tile rows), ``"round-robin"`` or
        ``"sequential"``, the last two in the order in which C is stored.
    blocking : Blocking
        What `kblocks` alone takes.
    tune : int
        With ``"auto"``: how many of the schedules that the search found are tried, in turns, by the first calls of a
        plan (four each), after which it keeps the fastest. At most `MOST_TRIED`; 0 and 1 take the search's choice.
        Sums of k are then added in another order from call to call until the choice is made.
    metric : str
        What the search of ``"auto"`` minimises, or the choice of ranks and shares of ``"cyclic"``; one of
        `uncut_mpi.planning.metrics.METRICS`. ``"time"``; ``"pdp"``, the energy of the devices of all ranks; ``"edp"``,
        that times the time; ``"pdp-working"``, the energy of the devices that take part. All but the first need a
        machine whose watts are known.

    Notes
    -----
    `uncut` takes all but `areas`, `distribution`, `blocking`, `tune` and `metric`; `kblocks` `grid`, `devices`, shares,
    `areas` and `blocking`; `cyclic` `grid`, `devices`, `row_shares`, `col_shares`, `tile`, `max_hops`, `compute_lanes`,
    `distribution` and `metric`; `bands` `devices` and `tile`.

    Rows and columns are those of the caller's C, in whatever order it is stored. `areas`, `distribution` and most
    orders of blocks cut C into strips, which follow its storage: whole columns of an F-order C, whole rows of a C-order
    one.
    """

    scheduler: str = "auto"
    tile: int = 0
    tile_min: int = 2048
    grid: tuple[int, int] | None = None
    devices: tuple[int, ...] | None = None
    row_shares: tuple[float, ...] | None = None
    col_shares: tuple[float, ...] | None = None
    k_shares: tuple[float, ...] | None = None
    areas: tuple[tuple[float, ...], ...] | None = None
    chunks: int | None = None
    min_chunk_bytes: int | None = None
    compute_lanes: int = 8
    caching: bool = True
    overlap: bool = True
    routing: str = "eta"
    batch: bool = True
    max_hops: int | None = None
    wr_lazy: bool = True
    order: str = "eta"
    distribution: str = "2d-cyclic"
    blocking: Blocking = Blocking()
    tune: int = 0
    metric: str = "time"

    def oriented(self, problem: GemmProblem) -> ScheduleOptions:
        """
        Return options of the caller's C as those of a problem's C, and the other way round.

        A C stored by rows is transposed in its problem, so rows and columns change places: of the grid, its shares,
        and the blocks of the order ``"corner"``. Ranks still fill the caller's grid row by row
        (`uncut_mpi.planning.grid`). Strips, in which the other orders of blocks and `areas` cut C, follow its storage
        in both.
        """
        if not problem.swapped:
            return self
        blocking = self.blocking
        if blocking.order == "corner" or blocking.rows > 1:
            blocking = changed(blocking, order="corner", rows=blocking.columns, columns=blocking.rows)
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
    def chooses_devices(self) -> bool:
        """Whether nothing is said of who computes and of shares."""
        return all(getattr(self, name) is None for name in _BLOCKS)

    @property
    def most_chunks(self) -> int:
        """Chunks of a fetch at most."""
        return MOST_CHUNKS if self.chunks is None else self.chunks

    @property
    def schedulers(self) -> tuple[str, ...]:
        """
        The schedulers that these options leave to choose from.

        ``"auto"`` leaves out those that do not take all that was given.

        Raises
        ------
        ParamError
            If there is none.
        """
        left = tuple(one for one in _TAKES if self.scheduler in (one, "auto") and not self.foreign(one))
        if not left:
            if self.scheduler == "auto":
                raise ParamError(f"no scheduler takes all of {', '.join(self.given)}: leave some of them out")
            raise ParamError(
                f"scheduler {self.scheduler} does not take {', '.join(self.foreign(self.scheduler))}: leave that out"
            )
        return left

    def check(self) -> None:
        """Raise `ParamError` if no scheduler takes all that was given."""
        assert self.schedulers

    @property
    def given(self) -> tuple[str, ...]:
        """Names of what was said of the schedule itself: all that differs from its default, `Blocking` included."""
        names = [
            field.name
            for field in dataclasses.fields(self)
            if field.name not in ("scheduler", "blocking", "tune", "metric")
            and getattr(self, field.name) != field.default
        ]
        names += [f"blocking.{one.name}" for one in dataclasses.fields(Blocking) if getattr(self.blocking, one.name)]
        return tuple(names)

    def foreign(self, scheduler: str) -> tuple[str, ...]:
        """Return the names of the given options that a scheduler does not take."""
        return tuple(name for name in self.given if name not in _TAKES[scheduler])

    def __post_init__(self) -> None:
        _convert(self, _SCHEDULE)
        if self.grid is not None and len(self.grid) != 2:
            raise ParamError(f"grid = {shown(self.grid)} has {len(self.grid)} numbers: pass two, rows and columns")
        if not isinstance(self.blocking, Blocking):
            raise ParamError(f"blocking = {shown(self.blocking)} is {type_text(self.blocking)}: pass a Blocking")
        if self.scheduler not in SCHEDULERS:
            raise ParamError(f"scheduler {self.scheduler!r} does not exist: use one of {', '.join(SCHEDULERS)}")
        if self.routing not in ROUTINGS:
            raise ParamError(f"routing {self.routing!r} does not exist: use one of {', '.join(ROUTINGS)}")
        if self.distribution not in DISTRIBUTIONS:
            raise ParamError(
                f"distribution {self.distribution!r} does not exist: use one of {', '.join(DISTRIBUTIONS)}"
            )
        if self.order not in ORDERS:
            raise ParamError(f"order {self.order!r} does not exist: use one of {', '.join(ORDERS)}")
        for name, least in (("tile", 0), ("tile_min", 1), ("compute_lanes", 1)):
            if getattr(self, name) < least:
                raise ParamError(f"{name} = {getattr(self, name)} is below {least}")
        if self.chunks is not None and self.chunks < 1:
            raise ParamError(f"chunks = {self.chunks} is below 1")
        if self.min_chunk_bytes is not None and self.min_chunk_bytes < 1:
            raise ParamError(f"min_chunk_bytes = {self.min_chunk_bytes} is below 1")
        if not 0 <= self.tune <= MOST_TRIED:
            raise ParamError(f"tune = {self.tune} is not a whole number from 0 to {MOST_TRIED}")
        if self.tune > 1 and self.scheduler != "auto":
            raise ParamError(
                f"tune = {self.tune} with scheduler {self.scheduler!r}: it tries what a search finds, so take "
                "scheduler='auto', or leave tune out"
            )
        check_metric(self.metric)
        if self.metric != "time" and self.scheduler not in ("auto", "cyclic"):
            raise ParamError(
                f"metric = {self.metric!r} with scheduler {self.scheduler!r}: a search minimises it, or cyclic's "
                "choice of ranks, so take scheduler='auto' or 'cyclic', or leave metric out"
            )
        if self.metric != "time" and self.scheduler == "cyclic" and not self.chooses_devices:
            fixed = ", ".join(name for name in _BLOCKS if name in self.given)
            raise ParamError(
                f"metric = {self.metric!r} with {fixed}: by it cyclic chooses who computes and how much, so leave one "
                "of the two out"
            )
        if self.metric != "time" and self.tune > 1:
            raise ParamError(
                f"metric = {self.metric!r} with tune = {self.tune}, which keeps the fastest of what it tries: "
                "leave one of them out"
            )
        if self.compute_lanes > 64:
            raise ParamError(f"compute_lanes = {self.compute_lanes} is above 64")
        if self.grid is not None and min(self.grid) < 1:
            raise ParamError(f"grid {self.grid[0]}x{self.grid[1]} has an extent below 1")
        if self.max_hops is not None and not 0 <= self.max_hops <= MAX_HOPS:
            raise ParamError(f"max_hops = {self.max_hops} is not 0 to {MAX_HOPS}")
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
                f"{len(self.k_shares)} k_shares were given for {splits} parts of k (splits, --splits): name one "
                "for each"
            )
        if self.areas is not None:
            self._check_areas(self.areas)

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


_Options = TypeVar("_Options", Blocking, ScheduleOptions)
_NAMES: Final = {kind: [one.name for one in dataclasses.fields(kind)] for kind in (Blocking, ScheduleOptions)}
# Slots are written through their descriptors: the classes themselves are frozen.
_SETTERS: Final = {kind: {name: vars(kind)[name].__set__ for name in names} for kind, names in _NAMES.items()}
_GETTERS: Final = {kind: operator.attrgetter(*names) for kind, names in _NAMES.items()}
