"""
The out-of-core product of PaRSEC: its model of transfers, its choice of blocks, and its schedule.

From T. Herault, Y. Robert, G. Bosilca and J. Dongarra, *Generic matrix multiplication for multi-GPU accelerated
distributed-memory platforms over PaRSEC* (ScalA 2019), section III. Numbers of equations are those of the paper.

p×q processes, the nodes of the machine, share C. Each cuts its part into blocks of b×c tiles, which it forms one after
the other, down the columns. Its G devices have c/G columns each. k is cut into k-blocks of depth d, the paper's chunks.
A device holds its part of a block of C, and of ℓ + 1 k-blocks of A and B. A k-block comes when all devices of its
process are through with the one ℓ + 1 before it. That is the paper's barrier (section II). What one block needed is not
kept for the next one, but for all of B's columns where there is room for them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Final

from uncut_mpi.errors import CapacityError, ParamError
from uncut_mpi.model.placement import Matrix
from uncut_mpi.planning import kblocks
from uncut_mpi.planning.description import blocks_text, grid_text
from uncut_mpi.planning.grid import ProcessGrid
from uncut_mpi.planning.limits import MAX_TASKS
from uncut_mpi.planning.options import Blocking, ScheduleOptions, changed
from uncut_mpi.planning.others import Scheduler
from uncut_mpi.planning.schedule import Schedule
from uncut_mpi.planning.setting import Setting

TILE: Final = 1024
"""The paper's tile edge, from which on its performance did not grow any more (section V-A)."""

C_FRACTION: Final = 0.75
"""What of a device's memory a block of C occupies (section III-B3)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Blocks:
    """
    Sizes that the algorithm is run with.

    Attributes
    ----------
    b, c : int
        Rows and columns of a process's block of C (tiles).
    d : int
        Depth of a k-block (tiles).
    lookahead : int
        ℓ, k-blocks whose data come while one is computed.

    Raises
    ------
    ParamError
        If a size is below 1, or the lookahead below 0.
    """

    b: int
    c: int
    d: int
    lookahead: int

    def __post_init__(self) -> None:
        if min(self.b, self.c, self.d) < 1 or self.lookahead < 0:
            raise ParamError(f"{self}: sizes are at least 1, and the lookahead is at least 0")


@dataclasses.dataclass(frozen=True, slots=True)
class ParsecModel:
    """
    What is transferred for C(M, N) = A(M, K) B(K, N) on p×q processes with G devices each, all in tiles.

    Attributes
    ----------
    m, n, k : int
        M_t, N_t and K_t (tiles).
    p, q : int
        Rows and columns of processes.
    devices : int
        G, those of each process.
    memory : float
        Mem_GPU, what a device has room for (tiles).
    c_weight : float
        Tiles' room that a tile of C takes: 1 in the paper, more where sums are of a wider type.
    """

    m: int
    n: int
    k: int
    p: int = 1
    q: int = 1
    devices: int = 1
    memory: float = math.inf
    c_weight: float = 1.0

    def __post_init__(self) -> None:
        if min(self.m, self.n, self.k, self.p, self.q, self.devices) < 1 or self.memory <= 0 or self.c_weight <= 0:
            raise ParamError(f"{self} has an extent, a number of processes or devices, or memory that is not positive")

    def _fits_whole(self) -> bool:
        of_c = self.m * self.n / (self.p * self.q * self.devices) * self.c_weight
        return self.m * self.k / self.p + self.k * self.n / (self.q * self.devices) + of_c <= self.memory

    def rounds(self, blocks: Blocks) -> tuple[float, float]:
        """Return X = M_t/(bp) and Y = N_t/(cq), the blocks of C of a process down and along."""
        return self.m / (blocks.b * self.p), self.n / (blocks.c * self.q)

    def held(self, blocks: Blocks) -> float:
        """Return T(d, G) = bc/G + (ℓ + 1)(b + c/G)d, the tiles that a device holds (section II, with ℓ of III-B4)."""
        of_c = blocks.b * blocks.c / self.devices * self.c_weight
        return of_c + (blocks.lookahead + 1) * (blocks.b + blocks.c / self.devices) * blocks.d

    def case(self, blocks: Blocks) -> str:
        """
        Return which case of equation (1) some blocks are, with room for ℓ + 1 k-blocks where the paper has one.

        Returns
        -------
        {"a", "b", "c"}
            All of A, B and C fits a device; or all of B's columns that a block needs; or k-blocks.

        Raises
        ------
        CapacityError
            If not even a k-block fits.
        """
        of_c = blocks.b * blocks.c / self.devices * self.c_weight
        columns, k_blocks = blocks.c * self.k / self.devices, blocks.lookahead + 1
        if self._fits_whole():
            return "a"
        if k_blocks * blocks.b * blocks.d + columns + of_c <= self.memory:
            return "b"
        if self.held(blocks) <= self.memory:
            return "c"
        raise CapacityError(f"{blocks} takes more than the {self.memory:g} tiles that a device has room for")

    def per_gpu(self, blocks: Blocks) -> float:
        """
        Return Comm_GPU, the tiles that each device receives, from its node's memory or from another device.

        Equation (1). C counts once: it is read where it takes part, and always written back.
        """
        case = self.case(blocks)
        down, along = (1.0, 1.0) if case == "a" else self.rounds(blocks)
        of_b = self.k * self.n / (self.q * self.devices)
        return (
            along * self.m * self.k / self.p
            + (down if case == "c" else 1.0) * of_b
            + self.m * self.n / (self.p * self.q * self.devices)
        )

    def choose(self, lookahead: int | None = None) -> Blocks:
        """
        Return the paper's blocks: the largest block of C for three quarters of the memory, then the deepest k-blocks.

        One block of C if it fits so (case c1), else square ones (c2), in equal numbers. Where a side of C is shorter
        than the square's they have all of it, and are longer along the other. ℓ is 1 with one block and 2 with several
        (sections III-B3 and III-B4).

        Parameters
        ----------
        lookahead : int, optional
            Another ℓ.

        Raises
        ------
        ParamError
            If that is below 0.
        CapacityError
            If a device has no room for one tile of C and a k-block of one.
        """
        if lookahead is not None and lookahead < 0:
            raise ParamError(f"lookahead = {lookahead}: it is at least 0")
        rows, cols = math.ceil(self.m / self.p), math.ceil(self.n / self.q)
        room = C_FRACTION * self.memory / self.c_weight * self.devices  # for C, of all devices
        most = 0 if rows * cols <= room or self._fits_whole() else int(room)
        while True:
            b, c = self._block(rows, cols, most) if most else (rows, cols)
            ahead = self._ahead((b, c), (rows, cols), lookahead)
            left = self.memory - b * c / self.devices * self.c_weight
            d = int(min(self.k, left / ((ahead + 1) * (b + c / self.devices))))
            if d >= 1:
                return Blocks(b, c, _even(self.k, d), ahead)
            # Of so few tiles a quarter is no room for k-blocks.
            edge = math.isqrt(most - 1) if most else max(rows, cols) - 1
            if edge < 1:
                least = self.least(lookahead)
                raise CapacityError(
                    f"a device has room for {self.memory:g} tiles, and parsec needs {self.held(least):g}: a tile of C, "
                    f"and those of A and B with a lookahead of {least.lookahead}; let ranks use more memory "
                    "(device_memory), or take smaller tiles (tile)"
                )
            most = edge * edge

    def least(self, lookahead: int | None = None) -> Blocks:
        """Return the blocks that take the least memory: a row of tiles, and a column for each device."""
        rows, cols = math.ceil(self.m / self.p), math.ceil(self.n / self.q)
        c = min(cols, self.devices)
        return Blocks(1, c, 1, self._ahead((1, c), (rows, cols), lookahead))

    @staticmethod
    def _ahead(block: tuple[int, int], whole: tuple[int, int], lookahead: int | None) -> int:
        return (1 if block == whole else 2) if lookahead is None else lookahead

    def _block(self, rows: int, cols: int, most: int) -> tuple[int, int]:
        """Return the rows and columns of equal blocks of C that have no more than so many tiles."""
        edge = math.isqrt(most)
        down, along = most // cols if cols <= edge else edge, most // rows if rows <= edge else edge
        return _even(rows, down), _even(cols, max(self.devices, along // self.devices * self.devices))


def _even(extent: int, most: int) -> int:
    """Return the extent of the fewest equal parts of no more than so much."""
    return math.ceil(extent / math.ceil(extent / most))


def blocking_of(model: ParsecModel, blocks: Blocks, tile: int) -> Blocking:
    """Return some blocks as options of `kblocks`, on nodes whose ranks are the devices, by the edge of a tile."""
    k_blocks = blocks.lookahead + 1
    keeps_columns = model.case(blocks) != "c"
    return Blocking(
        first=blocks.d * tile,
        block=blocks.d * tile,
        columns=4,
        slots=k_blocks,
        b_slots=max(k_blocks, math.ceil(model.k / blocks.d)) if keeps_columns else k_blocks,
        c_slots=1,
        c_rows=blocks.b * tile,
        c_cols=math.ceil(blocks.c / model.devices) * tile,
        sweep="again",
        barrier="node",
    )


def devices_of_nodes(setting: Setting) -> list[list[int]]:
    """
    Return the ranks that compute, node by node: a process's devices.

    Raises
    ------
    ParamError
        If nodes have different numbers of them.
    """
    nodes: dict[int, list[int]] = {}
    for rank in setting.options.computing_ranks(setting.num_ranks):
        nodes.setdefault(int(setting.machine.node_of[rank]), []).append(rank)
    if len(counts := [*map(len, nodes.values())]) > 1 and len({*counts}) > 1:
        raise ParamError(f"parsec has as many devices on each node, found {counts}: name such devices")
    return [*nodes.values()]


def model_of(setting: Setting, tile: int) -> ParsecModel:
    """
    Return the model of a product on nodes whose ranks are the devices.

    The grid of nodes is the one on which a process receives least with one block of C, of equals that of fewest rows.

    Parameters
    ----------
    setting : Setting
        As for `schedule`.
    tile : int
        Edge of a tile (elements).

    Raises
    ------
    ParamError
        If nodes have different numbers of devices.
    """
    nodes, problem = devices_of_nodes(setting), setting.problem
    room = min(setting.room[rank] for ranks in nodes for rank in ranks)
    item = problem.arithmetic.itemsize
    of_c = problem.accumulator.itemsize + (problem.dtypes[Matrix.C].itemsize if problem.rounds_c else 0)
    m, n, k = (math.ceil(one / tile) for one in (problem.m, problem.n, problem.k))
    memory = max(1, room) / (tile * tile * item)
    return min(
        (
            ParsecModel(m, n, k, p, len(nodes) // p, len(nodes[0]), memory=memory, c_weight=of_c / item)
            for p in range(1, len(nodes) + 1)
            if len(nodes) % p == 0
        ),
        key=lambda one: problem.m / one.p * (1 - 1 / one.q) + problem.n / one.q * (1 - 1 / one.p),
    )


def received_bytes(setting: Setting, tile: int = TILE) -> float:
    """
    Return what devices receive of A and B by equation (1), and of C once (bytes); arguments as `model_of`.

    Blocks are those of whole tiles, extents the matrices' own. Of tiles that a device has no room for the largest half,
    quarter, … is taken that there is room for.

    Raises
    ------
    CapacityError
        If a device has no room for one element.
    """
    problem = setting.problem
    tile = min(tile, max(problem.m, problem.n, problem.k))
    while True:
        try:
            model = model_of(setting, tile)
            chosen, area = model.choose(), tile * tile
            break
        except CapacityError:
            if tile == 1:
                raise
            tile //= 2
    blocks = Blocks(min(chosen.b * tile, problem.m), min(chosen.c * tile, problem.n), chosen.d * tile, chosen.lookahead)
    elements = dataclasses.replace(model, m=problem.m, n=problem.n, k=problem.k, memory=model.memory * area)
    return model.p * model.q * model.devices * elements.per_gpu(blocks) * problem.arithmetic.itemsize


def schedule(setting: Setting, *, most_tasks: int = MAX_TASKS) -> tuple[Schedule, ScheduleOptions]:
    """
    Return PaRSEC's schedule, and the options with what it chose.

    Pure and deterministic. Devices are the ranks, each with columns of C beside the others' of its node.

    Parameters
    ----------
    setting : Setting
        `devices`, `tile` and `blocking.slots`, which is ℓ + 1, are taken from its options.
    most_tasks : int, optional
        As for `uncut_mpi.planning.kblocks.schedule`, whose errors are this one's too.

    Raises
    ------
    CapacityError
        If a device has too little memory for a tile of C and a k-block of one.
    ParamError
        If nodes have different numbers of devices.
    """
    problem, options = setting.problem, setting.options
    tile = min(options.tile or TILE, max(problem.m, problem.n, problem.k))
    model, ranks = model_of(setting, tile), devices_of_nodes(setting)
    grid = ProcessGrid(model.p, model.q * model.devices, problem.swapped)
    nodes = ProcessGrid(model.p, model.q, problem.swapped)
    devices = tuple(
        ranks[nodes.rank(row, col // model.devices)][col % model.devices]
        for row, col in map(grid.position, range(grid.size))
    )
    asked = changed(options, scheduler="kblocks", grid=(grid.rows, grid.cols), devices=devices, tile=0)
    made = _prepared(kblocks.Planner(setting), model, asked, tile)
    how = changed(made.options, scheduler="parsec", tile=tile)
    return dataclasses.replace(made.schedule(most_tasks), scheduler="parsec", tile=tile), how


def _prepared(planner: kblocks.Planner, model: ParsecModel, asked: ScheduleOptions, tile: int) -> kblocks.Prepared:
    """
    Return what a schedule is made of: the model's blocks, or those that it would choose for less memory.

    Panels take more than the model's tiles where columns are aligned or devices have a different number of tiles. They
    take less where a tile is larger than the matrix, so the least blocks are tried whatever the model says.
    """
    lookahead = asked.blocking.slots - 1 if asked.blocking.slots else None

    def of(now: ParsecModel, blocks: Blocks) -> kblocks.Prepared:
        return planner.prepare(changed(asked, blocking=blocking_of(now, blocks, tile)), in_core=True)

    now, least = model, model.least(lookahead)
    while now.memory > now.held(least):
        made = of(now, now.choose(lookahead))
        if made.fits:
            return made
        over = max(taken / max(1, room) for taken, room in zip(made.rank_bytes, planner.setting.room, strict=True))
        now = dataclasses.replace(now, memory=now.memory / max(over, 1.01))
    made = of(dataclasses.replace(model, memory=model.held(least)), least)
    if not made.fits:
        model.choose(lookahead)  # whose error says what it lacks
    return made


def describe(schedule: Schedule, options: ScheduleOptions) -> str:
    """Return how such a schedule divides its problem, in words."""
    return blocks_text(schedule, options, f"grid {grid_text(schedule)}")


SCHEDULER: Final = Scheduler(schedule, ("tile", "devices", "blocking.slots"), describe)
