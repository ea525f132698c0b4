"""
A table of errors: types, transposes, orders and layouts, each beside its bound, on whatever backend there is.

    mpiexec -n 4 python3 -m mpi4py tests/perf/type_errors.py OUT.json

Of each type all transposes and orders are multiplied in each layout, of random full-mantissa matrices, and C is
poisoned where it is not read. A cell is the largest error of any element divided by its bound (`tests.helpers.products`
has the bounds and their sources); 0 of int8 is exact. The status is 1 if one is beyond 1.
"""

import importlib
import itertools
import json
import sys
from typing import Any

import numpy as np
from mpi4py import MPI

import uncut_mpi as um
from tests.helpers.products import Case, Operands, expected, random_matrix

TYPES = ["f64", "f32", "tf32", "f16", "bf16", "c64", "c128", "f16,f16,f32", "bf16,bf16,f32", "i8", "e4m3", "e5m2"]
TYPES += ["e4m3,e4m3,bf16", "e4m3,e5m2,f16"]
SHAPES = (48, 40, 96), (65, 43, 57)


def layouts(size: int) -> dict[str, tuple[um.Layout, um.Layout, um.Layout]]:
    """Return how A, B and C are dealt, by a name."""
    grid = next((rows, size // rows) for rows in range(int(size**0.5), 0, -1) if size % rows == 0)
    rows, cols, whole = um.Layout.rows(), um.Layout.cols(), um.Layout.whole(size - 1)
    cyclic = um.Layout.block_cyclic(8, 8, grid)
    return {
        "whole": (whole, whole, whole),
        "rows": (rows, rows, rows),
        "rows,cols,rows": (rows, cols, rows),
        "cyclic": (cyclic, cyclic, cyclic),
        "cyclic,whole,cols": (cyclic, whole, cols),
    }


def worst(session: Any, case: Case, dealt: tuple[um.Layout, um.Layout, um.Layout]) -> float:
    """Return the largest error of this rank's elements of C beside its bound."""
    shapes = (case.m, case.k), (case.k, case.n), (case.m, case.n)
    turned = (case.trans_a != "N", case.trans_b != "N", False)
    memory = "device" if session.backend_name == "cuda" else "host"
    matrices, values = [], []
    for index, (shape, turn, dtype, layout) in enumerate(zip(shapes, turned, case.dtypes, dealt, strict=True)):
        shape = shape[::-1] if turn else shape
        value = random_matrix(*shape, dtype, (case.seed, index))
        made = session.empty(shape, dtype, layout, order=case.orders[index], memory=memory)
        rows, cols = layout.indices(shape, session.rank, num_ranks=session.size)
        mine = value[np.ix_(rows, cols)]
        if index == 2 and case.beta == 0 and not dtype.is_integer:
            mine = np.full_like(mine, np.nan)
        if mine.size:
            local = made.local
            if memory == "device":
                if dtype.numpy.isbuiltin != 1:  # cupy knows bits alone of these
                    mine, local = (one.view(f"u{dtype.itemsize}") for one in (mine, local))
                mine = importlib.import_module("cupy").asarray(mine)
            local[...] = mine
        matrices.append(made)
        values.append(value)
    session.gemm(*matrices, **case.how)
    (a, b, c), (a_values, b_values, c_values) = matrices, values
    operands = Operands(a, b, c, a_values, b_values, c_values, [], session.backend_name == "cuda")
    result, bound = expected(case, operands)
    rows, cols = dealt[2].indices(shapes[2], session.rank, num_ranks=session.size)
    local = matrices[2].local
    local = local.get() if hasattr(local, "get") else local
    found = np.asarray(local).view(case.dtypes[2].numpy).astype(result.dtype)
    here = np.ix_(rows, cols)
    error, room = np.abs(found - result[here]), np.abs(bound[here])
    for matrix in matrices:
        session.release(matrix)
    beside = np.where(error == 0, 0.0, error / np.maximum(room, np.finfo(float).tiny))
    return float(np.nan_to_num(beside, nan=np.inf).max(initial=0))


def main(path: str) -> int:
    """Measure, write and print the table; return the status."""
    comm = MPI.COMM_WORLD
    with um.Session(comm, timeout_s=60) as session:
        table: dict[str, dict[str, float]] = {}
        for dtype in TYPES:
            first = Case(1, 1, 1, dtype=dtype).dtypes[0]
            table[dtype] = {}
            for name, dealt in layouts(session.size).items():
                found = 0.0
                ops = itertools.product("NTC", repeat=2) if first.is_complex else itertools.product("NT", repeat=2)
                ways = itertools.product(ops, map("".join, itertools.product("FC", repeat=3)))
                for number, ((trans_a, trans_b), orders) in enumerate(ways):
                    alpha, beta = (3, -2) if first.is_integer else (1.2345, 1.1154)
                    case = Case(
                        *SHAPES[number % 2],
                        dtype=dtype,
                        trans_a=trans_a,
                        trans_b=trans_b,
                        orders=orders,
                        alpha=alpha,
                        beta=beta * (number % 3 > 0),
                        seed=number,
                        scales=(0.37, 2.9) if first.needs_scales else (),
                    )
                    found = max(found, worst(session, case, dealt))
                table[dtype][name] = max(session.gather_values(found))
        about = {"backend": session.backend_name, "devices": session.device_names, "versions": session.versions}
    if comm.rank == 0:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({**about, "largest_error_beside_its_bound": table}, file, indent=1)
        columns = list(layouts(comm.size))
        print(" | ".join(["types", *columns]))
        for dtype, row in table.items():
            print(" | ".join([dtype, *(f"{row[name]:.2f}" for name in columns)]))
    return int(max(value for row in table.values() for value in row.values()) > 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
