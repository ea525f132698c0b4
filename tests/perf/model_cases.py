"""
Writes the problems with which a node of 4 GPUs, or of 2, tests the model, as `model_data.py` reads them.

    python tests/perf/model_cases.py problems >problems.json
    python tests/perf/model_cases.py candidates [2] >candidates.json
    python tests/perf/model_cases.py energy [2] >energy.json

*problems*: what the search chooses for squares, fat and thin products, four placements, three types. *candidates*: ten
products with 25 to 31 schedules each (schedulers, grids, tiles, orders, subsets of the GPUs), the search's choice among
them; the fastest of them and that choice are measured again, in turns. *energy*: two products on one GPU and more, by
time and by energy.
"""

import json
import sys

SMALLEST_TILE = 256


def case(size, dtype, place, options=("scheduler=auto",), **more):
    """Return one entry of the list."""
    m, n, k = (size,) * 3 if isinstance(size, int) else size
    return {"m": m, "n": n, "k": k, "dtype": dtype, "place": place, "options": list(options), **more}


def problems():
    """Return 47 problems, the largest last."""
    everywhere = ("0,0,0", "h,h,h", "0,1,2", "h,h,0")
    return [
        *(case(size, "f64", place) for size in (2048, 4096, 8192) for place in everywhere),
        *(case(size, "f32", place) for size in (4096, 8192) for place in everywhere[:3]),
        *(case(size, "f16", place) for size in (4096, 8192) for place in everywhere[:3]),
        *(case((3072, 3072, 24576), "f64", place) for place in everywhere[:2]),
        *(case((8192, 8192, 1024), "f64", place) for place in everywhere[:2]),
        *(case((4096, 4096, 65536), "f64", place) for place in everywhere[:3]),
        *(case((4096, 4096, 32768), "f16", place) for place in everywhere[:2]),
        case(16384, "f32", "0,0,0"),
        *(case(16384, "f16", place) for place in everywhere[:3]),
        *(case((24576, 24576, 2048), "f64", place) for place in everywhere[:3]),
        *(case(16384, "f64", place) for place in everywhere[:3]),
        case(16384, "f32", "h,h,h"),
        case(24576, "f64", "0,0,0"),
        case(24576, "f16", "h,h,h"),
        case(24576, "f64", "h,h,h"),
    ]


def schedules(size, place, ranks):
    """Return the schedules of a product of one size."""
    edge = size if isinstance(size, int) else min(size)
    tiles = sorted({max(SMALLEST_TILE, edge // part) for part in (2, 4, 8)})
    square = "2x2" if ranks == 4 else None
    grids = tuple(one for one in (square, f"1x{ranks}", f"{ranks}x1") if one)
    orders = ("k", "columns", "corner") if square else ("k", "k-columns", "columns", "corner")
    texts = [f"scheduler=uncut grid={grid} tile={tile}" for grid in grids for tile in tiles]
    texts += [
        f"scheduler=kblocks grid={grid} k.order={order} k.first={first}"
        for grid in grids
        for order in orders
        for first in (256, 1024)
    ]
    if square:
        texts += [f"scheduler=uncut devices=0,1 grid={grid} tile={tiles[-1]}" for grid in ("1x2", "2x1")]
        texts += ["scheduler=kblocks devices=0,1", "scheduler=kblocks devices=0,1,2"]
    texts += ["scheduler=kblocks devices=0"]
    texts += ["scheduler=kblocks", "scheduler=uncut", "scheduler=cyclic"]
    if "h" not in place:
        texts.append("scheduler=bands")
    return [*texts, "scheduler=auto"]


def candidates(ranks):
    """Return ten problems with their schedules."""
    apart = "0,1,2" if ranks > 2 else "0,1,0"
    chosen = [
        (2048, "f64", "0,0,0"),
        (4096, "f64", "0,0,0"),
        (4096, "f64", "h,h,h"),
        (4096, "f64", apart),
        (4096, "f64", "h,h,0"),
        (4096, "f32", "0,0,0"),
        (4096, "f16", "h,h,h"),
        (8192, "f64", "0,0,0"),
        (8192, "f64", "h,h,h"),
        (8192, "f16", "0,0,0"),
    ]
    return [case(size, dtype, place, schedules(size, place, ranks), again=4) for size, dtype, place in chosen]


def energy(ranks):
    """Return products on 1 GPU and more."""
    texts = [f"scheduler=kblocks devices={','.join(map(str, range(count)))}" for count in range(1, ranks + 1)]
    return [
        case(
            size, "f64", "0,0,0", [*texts, "metric=time", "metric=pdp", "metric=edp", "metric=pdp-working"], energy=True
        )
        for size in (3000, 6144)
    ]


if __name__ == "__main__":
    ranks = int(sys.argv[2]) if len(sys.argv) > 2 else 4
    lists = {"problems": lambda _: problems(), "candidates": candidates, "energy": energy}
    json.dump(lists[sys.argv[1]](ranks), sys.stdout, indent=1)
