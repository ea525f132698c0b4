"""
The machines that ship with the package, from figures kept here.

``python -m tests.data.make_machines``, in the root of the repository, writes ``uncut_mpi/machines``; a test
compares. README.md beside this file has the sources of the data. Locations are numbered as in `Machine`:
devices first, the host last. The files of links have [destination][source], a `Machine` [source, destination].
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from tests.data import measured
from uncut_mpi.calibration.peaks import peak_bandwidth, peak_ports, unbeaten
from uncut_mpi.model.costs import HELD, GemmShape, IssueCosts, RowRates
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.ports import Port, device_ports, duplex_ports

DATA = Path(__file__).parent
MACHINES = DATA.parents[1] / "uncut_mpi" / "machines"

# The authors' library issues everything from one thread: 4.75 µs for each chunk copied, 17 µs for each product
# with its waits, fitted on four published rows on 8 GPUs. What waits and events cost is in these two; a
# COMBINE (their axpy) is taken to cost what a copy does.
AUTHORS_COSTS = IssueCosts(copy_s=4.75e-6, gemm_s=17e-6, combine_s=4.75e-6)
AUTHORS_COSTS_TEXT = (
    "issue costs: of the Uncut-GEMMs library on Karolina, 4.75 µs a copy and 17 µs a product with its waits, fitted on "
    "published rows of 8 GPUs; a combination is assumed to cost what a copy does, events and flags nothing more"
)

# Host time of one driver call from C++ on the node with 4 H200 (docs/performance.md has the node); event record
# and wait 0.2 µs together; a flag's round trip 14 µs. combine_s and event_latency_s are assumed.
H200_COSTS = IssueCosts(
    copy_s=1.3e-6,
    gemm_s=7.9e-6,
    combine_s=3e-6,
    wait_s=0.6e-6,
    signal_s=0.6e-6,
    event_s=0.1e-6,
    event_latency_s=2e-6,
    flag_latency_s=7e-6,
)

# The blocks are those in the names of cuBLAS kernels that profiles of large products show: d884gemm_128x64 and
# ampere_sgemm_128x128 on A100, volta_dgemm_128x64 and volta_sgemm_128x64 on V100. The depth to fill and drain and
# the overhead are chosen, a few µs each at these devices' rates.
A100_SHAPE = {"f64": GemmShape(128, 64, 32, 5e-6), "f32": GemmShape(128, 128, 32, 5e-6)}
V100_SHAPE = {"f64": GemmShape(128, 64, 32, 5e-6), "f32": GemmShape(128, 64, 32, 5e-6)}
SHAPE_TEXT = (
    "GEMM shapes: blocks as in the names of cuBLAS kernels for large products; half depth 32 and 5 µs a kernel chosen, "
    "not measured"
)


# A100-40GB: 90 % of 1.56 TB/s for what a kernel reads and writes together. A copy within the device reads and
# writes each byte. No file of links has the latter, and no published row depends on it: nothing is copied so.
A100_COMBINE_GB_PER_S = 1400.0
A100_OWN_GB_PER_S = A100_COMBINE_GB_PER_S / 2
A100_OWN_TEXT = "a copy within a GPU 700 GB/s: half of that, since each byte is read and written; not measured"


def read(name: str) -> dict:
    """Return a file of measurements."""
    return json.loads((DATA / name).read_text())


def links(machine_matrix: Sequence[Sequence[float | None]], to_itself: float) -> np.ndarray:
    """Return [source, destination] from a file's [destination][source]; what a device copies to itself is not there."""
    table = np.array(machine_matrix, np.float64).T
    np.fill_diagonal(table, to_itself)
    return table


def from_host(ranks: Iterable[int], host: int) -> list[tuple[int, int]]:
    return [(host, rank) for rank in ranks]


def to_host(ranks: Iterable[int], host: int) -> list[tuple[int, int]]:
    return [(rank, host) for rank in ranks]


def machine(
    name: str,
    bandwidth: np.ndarray,
    *,
    provenance: Sequence[str],
    rates: Mapping[str, float | Sequence[float]],
    latency_s: float,
    memory_bytes: int,
    multiprocessors: int,
    combine_gb_per_s: float,
    ports: Sequence[Port],
    gemm_shape: Mapping[str, GemmShape],
    costs: IssueCosts,
    row_rates: RowRates | None = None,
    busy_watts: float = 0.0,
    host_bytes: int = 0,
) -> Machine:
    ranks = len(bandwidth) - 1
    return Machine(
        name=name,
        # A key of measured hardware has no colon, so that none is ever equal to this one.
        key=f"shipped:{name}",
        bandwidth_gb_per_s=bandwidth,
        latency_s=np.full(bandwidth.shape, latency_s),
        gemm_tflop_per_s={dtype: np.broadcast_to(rate, ranks).astype(np.float64) for dtype, rate in rates.items()},
        memory_bytes=np.full(ranks, memory_bytes, np.int64),
        host_bytes=np.array([host_bytes], np.int64),
        ports=tuple(ports),
        gemm_shape=gemm_shape,
        multiprocessors=np.full(ranks, multiprocessors, np.int64),
        row_rates=row_rates or RowRates(),
        combine_gb_per_s=np.full(ranks, combine_gb_per_s),
        costs=costs,
        busy_watts=np.full(ranks, busy_watts),
        provenance="; ".join(provenance),
    )


def karolina() -> Machine:
    data = read("karolina_links.json")
    totals = data["host_totals_by_case"]
    alone, two, all_in = (totals[case] for case in ("1_1", "5_5", "255_85"))
    ranks, host = range(8), 8
    switches = [(rank, rank + 1) for rank in range(0, 8, 2)]
    ports = device_ports(ranks, 281.0, 281.0)
    both_ways = 2 * data["links9_isolated_bidir"][0][1]
    ports += [
        Port.of(f"device {one} - device {other}", both_ways, [(one, other), (other, one)])
        for one, other in itertools.combinations(ranks, 2)
    ]
    for pair in switches:
        ports += duplex_ports(
            "PCIe of devices {} and {}".format(*pair),
            from_host(pair, host),
            to_host(pair, host),
            in_gb_per_s=alone["uni_h2d_d2h"][0],
            out_gb_per_s=alone["uni_h2d_d2h"][1],
            both_gb_per_s=tuple(alone["bid_h2d_d2h"]),
        )
    # Two devices on different switches read 18 each, though one alone reads 22 and four pairs read 22 a pair.
    ports += [
        Port.of(f"host to devices {one} and {other}", two["uni_h2d_d2h"][0], from_host((one, other), host))
        for one, other in itertools.combinations(ranks, 2)
        if one // 2 != other // 2
    ]
    ports.append(Port.of("host in", all_in["uni_h2d_d2h"][1], to_host(ranks, host)))
    ports.append(Port.of("host", 97.3, from_host(ranks, host) + to_host(ranks, host)))
    return machine(
        "karolina-8xa100",
        links(data["links9_isolated_unidir"], to_itself=A100_OWN_GB_PER_S),
        provenance=[
            "Karolina, HGX 8×A100-SXM4-40GB, NVLink 3 with NVSwitch, PCIe 4 shared by pairs of GPUs",
            "links: p-anastas/PARALiA-GEMMex 8e63837, Deployment_files/karol_8A100_predep, integers entered by hand, "
            "NUMA-interleaved host memory, 2-D copies: a pair of GPUs 150 GB/s one way, 136 + 136 both ways",
            "in and out of a GPU 281 GB/s: measured between A100s with NVSwitch by Choi and Stegailov 2022",
            "host, in and out together, 97.3 GB/s: the best rate that any published run on 8 GPUs reached (the paper: "
            "96 GB/s for all); the files' 72 + 72 both ways is never reached",
            "f64, f32 17.2 TFLOP/s (the paper: clocks lowered by 12 % from 19.5) and 1.56 TB/s of memory: Uncut-GEMMs, "
            "table I; a combination at 90 % of that",
            A100_OWN_TEXT,
            "no rate is known for the half types",
            "watts are not known, and 0 here: the energies of the published results are a constant 400 W a GPU, not "
            "measured",
            SHAPE_TEXT,
            AUTHORS_COSTS_TEXT,
            "latency of 5 µs assumed",
            "1 TiB of host memory: the documentation of Karolina's accelerated nodes",
            "net, for Machine.cluster: InfiniBand HDR, 25 GB/s an adapter, a fat tree without blocking: "
            "docs.it4i.cz/karolina/network; four adapters a node assumed, and 2 µs",
        ],
        rates={"f64": 17.2, "f32": 17.2},
        latency_s=5e-6,
        host_bytes=1 << 40,
        memory_bytes=40 * 10**9,
        multiprocessors=108,
        combine_gb_per_s=A100_COMBINE_GB_PER_S,
        ports=ports,
        gemm_shape=A100_SHAPE,
        costs=AUTHORS_COSTS,
    )


def four_a100(name: str, file: str, folder: str, node: str) -> Machine:
    data = read(file)
    one_way = links(data["links5_isolated_unidir_interleaved"], to_itself=A100_OWN_GB_PER_S)
    both_ways = links(data["links5_isolated_bidir_interleaved"], to_itself=A100_OWN_GB_PER_S)
    host = 4
    ports: list[Port] = []
    for rank in range(host):
        ports += duplex_ports(
            f"PCIe of device {rank}",
            from_host([rank], host),
            to_host([rank], host),
            in_gb_per_s=float(one_way[host, rank]),
            out_gb_per_s=float(one_way[rank, host]),
            both_gb_per_s=(float(both_ways[host, rank]), float(both_ways[rank, host])),
        )
    return machine(
        name,
        one_way,
        provenance=[
            f"{node}, 4×A100-SXM4-40GB, each pair of GPUs with 4 NVLinks of its own",
            f"links: nvbandwidth 0.6 by the authors of p-anastas/PARALiA-GEMMex 8e63837, Deployment_files/{folder}, "
            "NUMA-interleaved host memory, one link at a time; what GPUs that use the host at once take from each "
            "other was not measured and is not modelled",
            "f32 18.4 TFLOP/s: measured on an A100 by Choi and Stegailov 2022; f64 assumed to be the same; no rate is "
            "known for the half types",
            "a combination at 90 % of 1.56 TB/s",
            A100_OWN_TEXT,
            SHAPE_TEXT,
            "issue costs: measured on a node with 4 H200, assumed here; latency of 5 µs assumed",
        ],
        rates={"f64": 18.4, "f32": 18.4},
        latency_s=5e-6,
        memory_bytes=40 * 10**9,
        multiprocessors=108,
        combine_gb_per_s=A100_COMBINE_GB_PER_S,
        ports=ports,
        gemm_shape=A100_SHAPE,
        costs=H200_COSTS,
    )


# GPUs of Vulcan with two NVLinks between them, and with one; each of the GPUs has six. All others reach each
# other over PCIe and the processors. (Which is which follows from the rates in vulcan_transfers.json.)
VULCAN_TWO_LINKS = ((0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7))
VULCAN_ONE_LINK = ((0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7))


def typical_rate(pairs: Iterable[tuple[int, int]], logs: Sequence[Mapping[str, Mapping[str, float]]]) -> float:
    """Return the median over all transfers of some logs on pairs of devices, each counted with its link's median."""
    samples = [
        log[link]["median_GBs"]
        for log in logs
        for one, other in pairs
        for link in (f"{one}->{other}", f"{other}->{one}")
        if link in log
        for _ in range(int(log[link]["count"]))
    ]
    return round(statistics.median(samples), 1)


def vulcan() -> Machine:
    logs = read("vulcan_transfers.json")["logs"]
    direct = [log for key, log in logs.items() if key.startswith("n_trans")]
    unrouted = [log for key, log in logs.items() if key.startswith("xkblas")]
    two, one = set(VULCAN_TWO_LINKS), set(VULCAN_ONE_LINK)
    far = set(itertools.combinations(range(8), 2)) - two - one
    host = 8
    bandwidth = np.full((9, 9), 12.0)
    # PARALiA sends nothing over the slow pairs, so what they reach is in XKBLAS's logs only.
    for pairs, rate in (
        (two, typical_rate(two, direct)),
        (one, typical_rate(one, direct)),
        (far, typical_rate(far, unrouted)),
    ):
        for source, destination in pairs:
            bandwidth[source, destination] = bandwidth[destination, source] = rate
    np.fill_diagonal(bandwidth, 380.0)
    far_links = sorted(far | {(destination, source) for source, destination in far})
    ports = []
    for pair in [(rank, rank + 1) for rank in range(0, 8, 2)]:
        label = "PCIe of devices {} and {}".format(*pair)
        into = from_host(pair, host) + [link for link in far_links if link[1] in pair]
        out_of = to_host(pair, host) + [link for link in far_links if link[0] in pair]
        ports += [Port.of(f"{label} in", 12.0, into), Port.of(f"{label} out", 12.0, out_of)]
    return machine(
        "vulcan-8xv100",
        bandwidth,
        provenance=[
            "Vulcan clx-ai at HLRS, 8×V100-32GB, one or two NVLinks or none between two GPUs, PCIe 3 shared by pairs",
            "links between GPUs: medians of the transfers of a DGEMM, p-anastas/PARALiA-Framework 2d613b1: PARALiA's "
            "where there is NVLink, XKBLAS's where there is none (slowed by what else ran; the paper: below 6 GB/s)",
            "PCIe 12 GB/s, shared by two GPUs, f64 7 and f32 14 TFLOP/s, memory 760 GB/s: PARALiA, ACM TACO 20(4), "
            "section 4; a copy within a GPU at half of that, since each byte is read and written; the two ways are "
            "assumed not to hinder each other; no rate is known for the half types",
            "watts: its table 4, GFLOP/s by GFLOP/s/W of 8 GPUs; those at rest are not known, and 0 here",
            SHAPE_TEXT,
            AUTHORS_COSTS_TEXT,
            "latency of 10 µs assumed",
        ],
        rates={"f64": 7.0, "f32": 14.0},
        latency_s=1e-5,
        memory_bytes=32 * 10**9,
        multiprocessors=80,
        combine_gb_per_s=760.0,
        ports=ports,
        gemm_shape=V100_SHAPE,
        costs=AUTHORS_COSTS,
        busy_watts=39996 / 17.27 / 8,
    )


def vulcan_uneven() -> Machine:
    even = vulcan()
    name = f"{even.name}-uneven"
    rates = np.array([3.5, 3.5, 5.0, 5.0, 3.5, 7.0, 3.5, 7.0])
    return dataclasses.replace(
        even,
        name=name,
        key=f"shipped:{name}",
        gemm_tflop_per_s={"f64": rates},
        typical_gemm_tflop_per_s={"f64": rates},
        gemm_shape={"f64": V100_SHAPE["f64"]},
        provenance=f"{even.name} with GPUs that other processes slow down, for f64 to 3.5 (0, 1, 4, 6), 5 (2, 3) and "
        f"7 TFLOP/s (5, 7): PARALiA, section 4.4; {even.provenance}",
    )


# Of a node of Summit, GB/s each way: the two NVLinks of a GPU with a processor or with another GPU of its socket, and
# the bus between the sockets. Memory of both sockets gives and takes so much in all.
SUMMIT_NVLINKS, SUMMIT_BUS, SUMMIT_MEMORY = 50.0, 64.0, 270.0


def summit() -> Machine:
    sockets, host = (range(3), range(3, 6)), 6
    bandwidth = np.full((7, 7), SUMMIT_NVLINKS)
    np.fill_diagonal(bandwidth, 405.0)
    ports = [Port.of("host memory", SUMMIT_MEMORY, from_host(range(host), host) + to_host(range(host), host))]
    across = [tuple(itertools.product(*pair)) for pair in (sockets, sockets[::-1])]
    for rank in range(host):
        into, out_of = (
            [link for way in across for link in way if link[end] == rank] for end in (1, 0)
        )  # through its processor, as what comes from the host
        ports.append(Port.of(f"NVLinks of device {rank} in", SUMMIT_NVLINKS, from_host([rank], host) + into))
        ports.append(Port.of(f"NVLinks of device {rank} out", SUMMIT_NVLINKS, to_host([rank], host) + out_of))
    for number, (source, destination) in enumerate((sockets, sockets[::-1])):
        # Half of what a GPU copies from or to host memory is of the other socket.
        half = from_host(destination, host) + to_host(source, host)
        weights = (1.0,) * len(across[number]) + (0.5,) * len(half)
        ports.append(Port(f"X-bus from socket {number}", SUMMIT_BUS, (*across[number], *half), weights))
    return machine(
        "summit-6xv100",
        bandwidth,
        provenance=[
            "a node of Summit, two sockets with a POWER9 and 3 V100-16GB each",
            "two NVLinks of 25 GB/s each way between a GPU and its processor, 64 GB/s of the X-bus between sockets: "
            "Herault, Robert, Bosilca and Dongarra, ScalA 2019, sections IV.A and V; taken as each way, since WikiChip "
            "has 4 bytes at 16 GT/s; nominal, copies reach less",
            "two NVLinks between GPUs of a socket, and none between the others, which go over both processors: "
            "WikiChip, Summit",
            "memory is spread over both sockets, so half of what goes between a GPU and memory takes the X-bus: "
            "the paper, section V.A, names it; the half is assumed, as of pages in turn",
            "host memory 270 GB/s, in and out together, as 135 of each socket: assumed",
            "f64 7.2 TFLOP/s: the best of ten large products in cuBLAS, the paper, section V; no other rate is known",
            "16 GB a GPU and 512 GB a node: the paper, section III.A",
            "a combination at 90 % of 900 GB/s; a copy within a GPU at half of that, since each byte is read and "
            "written; not measured",
            SHAPE_TEXT,
            AUTHORS_COSTS_TEXT,
            "latency of 10 µs assumed",
            "net, for Machine.cluster: two adapters (EDR) of 12.5 GB/s each way: WikiChip; 2 µs assumed",
        ],
        rates={"f64": 7.2},
        latency_s=1e-5,
        host_bytes=512 * 10**9,
        memory_bytes=16 * 10**9,
        multiprocessors=80,
        combine_gb_per_s=810.0,
        ports=ports,
        gemm_shape={"f64": V100_SHAPE["f64"]},
        costs=AUTHORS_COSTS,
    )


# Between devices a row above 8 KiB takes the time of one of 11 KiB, 33.6 ns, on 2 H200 (docs/performance.md,
# 2026-11-22): bytes / 390 GB/s over that less 3.3 ns, the latency of a copy of 1024 rows.
H200_DEVICE_ROWS = ((8704.0, 0.737), (10240.0, 0.869), (12288.0, 0.972))

# Within a device, of a calibration of 2 H200 on 2026-11-23.
H200_LOCAL_ROWS = (
    *((512.0, 0.094), (1024.0, 0.232), (2048.0, 0.371), (4096.0, 0.526), (8192.0, 0.469), (12288.0, 0.439)),
    *((16384.0, 0.42), (32768.0, 0.4), (131072.0, 0.4)),
)

# Calibrations of one H200 whose shapes of products ship. The earlier ones took for an overhead of kernels what traced
# products that wait take longer; the later ones say how soon tasks begin after kernels.
H200_SHAPES_BEFORE = ("h200_shapes_2026-11-23_19h_1.json", "h200_shapes_2026-11-23_19h_2.json")
H200_SHAPES = ("h200_shapes_2026-11-23_22h_1.json", "h200_shapes_2026-11-23_22h_2.json")
# How soon a copy begins after one that it awaits: a calibration of 4 H200, 2026-11-22. The later ones say it too.
H200_EVENT_LATENCY_S = 3.849199999139686e-07
# What copies within a device take of products: a calibration of two H100, 2026-11-28.
# Two H200, docs/performance.md, 2026-11-28.
SUM_WAITS = {"f64": 1.06, "f32": 4.0, "tf32": HELD, "f16": HELD, "bf16": HELD}
SUSTAINED = {"f64": 1.1, "f32": 1.0, "tf32": 1.13, "f16": 1.14, "bf16": 1.14}
COPY_SHARES = {"f64": 0.27, "f32": 0.71, "tf32": 0.73, "f16": 0.69, "bf16": 0.72}


def shapes_of(calibrations: Sequence[Machine]) -> dict[str, GemmShape]:
    """Return the mean of the shapes of products that some calibrations found, of blocks that are the same in all."""
    found = {}
    for name, first in calibrations[0].gemm_shape.items():
        each = [dataclasses.asdict(one.gemm_shape[name]) for one in calibrations]
        same = {
            key: value for key, value in dataclasses.asdict(first).items() if all(one[key] == value for one in each)
        }
        assert {"block_rows", "block_cols", "waves"} <= {*same}
        assert len({one["c_half_depth"] > 0 for one in each}) == 1  # 0 is not the least of depths: nothing is hidden
        mean = {key: statistics.fmean(one[key] for one in each) for key in each[0] if key not in same}
        found[name] = dataclasses.replace(first, **mean)
    return found


def with_shapes(machine: Machine, calibrations: Sequence[Machine]) -> Machine:
    """
    Return a machine with the shapes of others, and the rates with which products of 8192³ are expected to take as long.

    What depends on C alone takes as long as on the others, whose rates are a little different.
    """
    rates, shapes, extents = {}, {}, (8192, 8192, 8192, int(machine.multiprocessors[0]))
    for name, found in shapes_of(calibrations).items():
        old, of_ranks = machine.gemm_shape[name], machine.typical_gemm_tflop_per_s[name]
        seconds = np.array([old.seconds(*extents, 1e12 * rate) for rate in of_ranks])
        found_rate = statistics.fmean(float(one.typical_gemm_tflop_per_s[name][0]) for one in calibrations)
        deep = dataclasses.replace(found, half_depth=0.0)
        of_c_s = (found.work(*extents)[0] - deep.work(*extents)[0]) / (found_rate * 1e12)
        rates[name] = deep.work(*extents)[0] / (seconds - found.overhead_s - of_c_s) * 1e-12
        depth = found.half_depth * statistics.fmean(rates[name].tolist()) / found_rate
        shapes[name] = dataclasses.replace(found, half_depth=depth)
    return dataclasses.replace(machine, gemm_shape=shapes, typical_gemm_tflop_per_s=rates)


def without_traced_overhead(text: str) -> Machine:
    """Return a calibration without what traced products added to the start of a kernel."""
    one = Machine.from_json(text)
    added = json.loads(text)["rehearsal"]["parameters"]["kernel overhead"]
    shapes = {
        dtype: dataclasses.replace(shape, overhead_s=shape.overhead_s - added)
        for dtype, shape in one.gemm_shape.items()
    }
    return dataclasses.replace(one, gemm_shape=shapes)


def h200() -> Machine:
    calibrated = Machine.from_json((DATA / "h200_calibration.json").read_text())
    of_one = [without_traced_overhead((DATA / name).read_text()) for name in H200_SHAPES_BEFORE]
    of_one += [Machine.from_json((DATA / name).read_text()) for name in H200_SHAPES]
    calibrated = with_shapes(calibrated, of_one)
    # What probes found: the rehearsal moved one number for all, as there was no other.
    sampled = [json.loads((DATA / name).read_text())["samples"]["costs"] for name in H200_SHAPES]
    sampled.append({"event_latency_s": H200_EVENT_LATENCY_S})
    latencies = {
        name: statistics.fmean(costs[name] for costs in sampled if name in costs)
        for name in ("event_latency_s", "engine_latency_s", "kernel_latency_s")
    }
    transfers = [*measured.transfers(), *measured.earlier_transfers(calibrated.num_ranks)]
    rates = {
        name: np.maximum(of_ranks, max(one.gemm_tflop_per_s[name].max() for one in of_one))
        for name, of_ranks in calibrated.gemm_tflop_per_s.items()
    }
    possible = dataclasses.replace(
        calibrated,
        costs=dataclasses.replace(calibrated.costs, **latencies),
        gemm_shape={
            name: dataclasses.replace(
                shape,
                copy_share=COPY_SHARES[name],
                sum_wait=SUM_WAITS[name],
                sustained=SUSTAINED[name],
            )
            for name, shape in calibrated.gemm_shape.items()
        },
        gemm_tflop_per_s={**rates, "f64": np.maximum(rates["f64"], measured.EARLIER_F64_TFLOP_PER_S)},
        bandwidth_gb_per_s=peak_bandwidth(calibrated.bandwidth_gb_per_s, transfers),
        ports=peak_ports(calibrated.ports, transfers),
        row_rates=dataclasses.replace(
            calibrated.row_rates,
            device=tuple(sorted((*calibrated.row_rates.device, *H200_DEVICE_ROWS))),
            local=H200_LOCAL_ROWS,
        ),
    )
    return dataclasses.replace(
        unbeaten(possible, measured.products()),
        provenance="a node with 4 H200 (NVSwitch), one NUMA node, 2026-11-22: python -m uncut_mpi.calibrate, driver "
        "580.159.04, CUDA 13, Open MPI 4.1.6, 61 products rehearsed; host memory gave 165 GB/s in and 174 both ways"
        " then, elsewhere 150 to 204; what to expect is what that calibration found, capacities and best rates (for"
        " bounds) are the best of all calibrations and products measured on such nodes by then, "
        "for products of the four calibrations below too, and of earlier probes (64.7 TFLOP/s, 396 and 204 GB/s); "
        "rows of 8.5 to 12 KiB between devices are those of two H200, the same day, rows within a device of two and"
        " shapes of products of one (the mean of four calibrations, with the rates at which 8192×8192×8192 takes as "
        "long as before), and how soon tasks begin after those they await, the next day; what copies within a device "
        "take of products beside them is that of two H100, 2026-11-27; what sums wait for, and products at length, are"
        " of two H200, 2026-11-28",
    )


def machines() -> dict[str, Machine]:
    """Return every machine that ships, by the name of its file."""
    every = [
        karolina(),
        four_a100("meluxina-4xa100", "meluxina_links.json", "meluxina_4A100", "MeluXina"),
        four_a100("vega-4xa100", "vega_links.json", "vega_4A100", "Vega"),
        vulcan(),
        vulcan_uneven(),
        summit(),
        h200(),
    ]
    return {one.name: one for one in every}


if __name__ == "__main__":
    for name, made in machines().items():
        (MACHINES / f"{name}.json").write_text(made.to_json() + "\n", encoding="utf-8")
