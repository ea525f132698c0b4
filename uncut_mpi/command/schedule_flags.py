"""The flags that fix something about a schedule, the same for every command that plans."""

from __future__ import annotations

import argparse
from typing import Final

from uncut_mpi.command.flag_values import MOST_EXTENT, grid_of, one_of, whole
from uncut_mpi.planning.metrics import METRICS
from uncut_mpi.planning.option_fields import declared
from uncut_mpi.planning.options import DISTRIBUTIONS, ORDERS, ROUTINGS, SCHEDULERS, Blocking

_ROUTING: Final = (
    "where a tile is fetched from: its owner (origin), the holder with the fastest link (bw), or the one from which "
    "it arrives first (eta); default eta"
)


def add_schedule(parser: argparse.ArgumentParser) -> None:
    """Add the flags that fix something about the schedule."""
    common = parser.add_argument_group(
        "schedule",
        "What differs from its default stays fixed; the rest is chosen by simulation, or with --scheduler by\n"
        "that scheduler's own rules, which are the defaults named here.",
    )
    common.add_argument(
        "--scheduler",
        type=one_of(*SCHEDULERS),
        metavar="|".join(SCHEDULERS),
        help="uncut: the schedule of the Uncut-GEMMs paper with its heuristics; kblocks: few large products per rank; "
        "cyclic: PARALiA's; bands: Choi's, between devices only; auto: whichever simulation finds best; default auto",
    )
    metrics = "; ".join(f"{name}: {metric.about}" for name, metric in METRICS.items())
    common.add_argument(
        "--metric",
        type=one_of(*METRICS),
        default="time",
        metavar="|".join(METRICS),
        help=f"what the search of auto minimises, or cyclic's choice of ranks. {metrics}. All but time need a machine "
        "file with the devices' power; default %(default)s",
    )
    common.add_argument(
        "--grid",
        type=grid_of,
        metavar="RxC",
        help="process grid; default: all ranks, as square as can be, R <= C; kblocks between host matrices: up to 32 "
        "ranks a row",
    )
    _add_tiles(parser.add_argument_group("schedule of uncut"))
    _add_blocking(parser.add_argument_group("schedule of kblocks"))
    group = parser.add_argument_group(
        "schedule of cyclic and bands",
        "cyclic takes --grid, --tile, --max-hops and --compute-lanes too, bands --tile; both choose tiles by their\n"
        "papers' models, cyclic the ranks that compute as well.",
    )
    group.add_argument(
        "--distribution",
        type=one_of(*DISTRIBUTIONS),
        metavar="|".join(DISTRIBUTIONS),
        help="how cyclic deals tiles of C out; default 2d-cyclic",
    )


def _add_tiles(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--tile", type=whole(1, MOST_EXTENT), default=0, metavar="T", help="tile edge; default: the paper's heuristic"
    )
    group.add_argument(
        "--tile-min",
        type=whole(1, MOST_EXTENT),
        default=2048,
        metavar="T",
        help="T_min of the tile heuristic; default %(default)s",
    )
    group.add_argument(
        "--chunks", type=whole(1), metavar="P", help="chunks of a batched fetch; default 2 a hop, at most 8"
    )
    group.add_argument(
        "--min-chunk",
        type=whole(1, MOST_EXTENT),
        metavar="BYTES",
        help="smallest chunk of a batched fetch; default 262144",
    )
    group.add_argument(
        "--compute-lanes", type=whole(1), default=8, metavar="L", help="compute lanes per rank; default %(default)s"
    )
    group.add_argument("--no-caching", dest="caching", action="store_false", help="fetch tiles anew each time")
    group.add_argument("--no-overlap", dest="overlap", action="store_false", help="one lane per rank for everything")
    group.add_argument("--routing", type=one_of(*ROUTINGS), metavar="|".join(ROUTINGS), help=_ROUTING)
    group.add_argument(
        "--max-hops",
        type=whole(0),
        metavar="H",
        help="most ranks that a tile is relayed over where its link is slow, 0 to 2; default 1, and 0 for cyclic with\n"
        "a matrix in host memory",
    )
    group.add_argument("--no-batch", dest="batch", action="store_false", help="no batched fetch")
    group.add_argument("--no-wr-lazy", dest="wr_lazy", action="store_false", help="always fetch C first")
    group.add_argument(
        "--order", type=one_of(*ORDERS), metavar="|".join(ORDERS), help="order of sub-problems; default eta"
    )


def _add_blocking(group: argparse._ArgumentGroup) -> None:
    for name, about in declared(Blocking):
        group.add_argument(
            about.flag,
            dest=f"blocking.{name}",
            type=one_of(*about.words) if about.words else whole(about.least, about.most),
            metavar=about.metavar,
            help=about.help,
        )
