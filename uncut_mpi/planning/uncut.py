"""
The schedule of the Uncut-GEMMs paper (sections III-A to III-G): geometry and memory here, tasks natively.

A rank's part of C is cut into tiles, and each tile of C takes one sub-problem for every tile of k. Tiles of A and B are
fetched along chains of ranks, and C tiles are written back. `prepare` says what happens to one sub-problem, who issues
a copy, and in which order sub-problems come.

Times are the model's, as integers in picoseconds, so that equal inputs give equal bytes anywhere.
Without caching no copy is ever nearer than another, so the order is the fixed one.
"""

from __future__ import annotations

from typing import Final

from uncut_mpi.planning.decomposition import candidate_tiles, grid_starts
from uncut_mpi.planning.grid import ProcessGrid
from uncut_mpi.planning.limits import MAX_TASKS, coarse_enough
from uncut_mpi.planning.options import MOST_CHUNKS, changed
from uncut_mpi.planning.setting import Setting
from uncut_mpi.planning.tiles import PreparedTiles, TileWorkers, least_tasks, prepare_tiles

_MOST_TASKS_EACH: Final = 1 + 2 * MOST_CHUNKS
"""Tasks that are counted for a sub-problem at most: its product, and chunks of tiles of A and B."""


def prepare(setting: Setting, *, most_tasks: int = MAX_TASKS) -> PreparedTiles:
    """
    Return what the paper's schedule for a product is made of, here or elsewhere.

    Pure: the same arguments give the same bytes.

    Raises
    ------
    ParamError
        If the grid or the devices name ranks that do not exist, or there is not one share for each grid row and column.
    CapacityError
        If a rank's panels do not fit its device memory beside the matrices that live there.
    PlanError
        If there would surely be more than `most_tasks` tasks.

    Notes
    -----
    What happens to one sub-problem (i, j, p) of a rank, C_ij += op(A)_ip op(B)_pj:

    * Tiles of matrices in parts end where parts do, and begin anew there. So each lies in one part: it is read in place
      by who holds it, others fetch it from there, and C tiles are written to all that hold them.
    * A and B tiles that the rank lacks are fetched into its panels. With batching one fetch serves all ranks of the
      grid row (A) or column (B). The tile is cut into chunks along its stored columns, which pass from rank to rank.
    * C is fetched with the first sub-problem of its tile, or with the last (WR-lazy); where C is at home the product is
      formed in place. Half types sum in float32 and are rounded once, by a COMBINE at the end.
    * All sub-problems of a C tile are on one compute lane; the first one that is scheduled carries beta. The last one
      is followed by COMBINE (WR-lazy, half types) and the write-back.

    * Where a link is much slower than a chain of links over one or two other ranks (`RELAY_GAIN`), a tile may go over
      the chain, in chunks. With routing "bw" it always does, with "eta" if it then arrives earlier. C tiles likewise,
      both ways. Ranks on the way keep the copies, in a cache, and are sources for later fetches; one that needs the
      tile itself takes it into its panel. A rank without room for a copy passes nothing on.

    Who issues a copy: whoever's private host memory it touches; between shared host memory and a device, the device;
    between devices, the source (push). There is one lane per (issuing rank, source, destination), and between devices
    another for C tiles on their way back, which await their products. Where a device serves its copies one after
    another (`Machine.serial_copies`), it has one of each kind for all other devices. Without overlap each rank has one
    lane and pulls what it needs.

    The order "eta" (III-G1) serves ranks in turn. A sub-problem's start is the later of its tiles' ETA (of the best
    routes, if some have yet to be fetched) and the end of what the rank computes already. Among sub-problems whose
    tiles have all arrived by then: the most advanced C tile, then the lowest (j, i), then the earliest ETA and the
    lowest p. If there is none, the smallest of

    1. start;
    2. the number of tiles to fetch for it;
    3. the number of sub-problems that its one missing tile would make ready, the larger the better;
    4. (j, i, p).

    Without batching, of the steps p of which a rank has no tile yet only the first 8 are looked at. After half a second
    or so of looking the rest is taken in the order of (j, i, p).

    The order "finish" puts before 2 whether the sub-problem opens a new C tile, so that C tiles finish, and are written
    back, one after the other.
    """
    problem, placement, options = setting.problem, setting.placement, setting.options
    devices = options.computing_ranks(setting.num_ranks)
    grid = ProcessGrid.choose(len(devices), options.grid, transposed=problem.swapped)
    ranks = [devices[grid.rank(row, col)] for row in range(grid.rows) for col in range(grid.cols)]
    row_starts, col_starts = grid_starts(problem, grid, options.row_shares, options.col_shares)

    def cut(tile: int) -> TileWorkers:
        return TileWorkers(ranks, row_starts, col_starts, tile)

    bound_s = 0.0 if options.tile else setting.bound_s(devices)
    workers = cut(candidate_tiles(problem, grid, options, 1, bound_s=bound_s)[0])
    products = workers.num_tiles() * -(-problem.k // workers.tile)
    if not options.tile and products > MAX_TASKS // _MOST_TASKS_EACH:
        largest = max(problem.m, problem.n, problem.k)
        workers = cut(
            coarse_enough(workers.tile, largest, lambda edge: least_tasks(problem, placement, cut(edge), options))
        )
    chosen = changed(options, scheduler="uncut", tile=workers.tile, grid=(grid.rows, grid.cols))
    return prepare_tiles(setting, workers, chosen=chosen, grid=grid, most_tasks=most_tasks)
