"""What a calibration says: matrices as nvbandwidth prints them, then what was fitted. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

import numpy as np

from uncut_mpi.calibration.assemble import fit_products, host_totals, slowdowns
from uncut_mpi.calibration.refine import Refinement
from uncut_mpi.calibration.samples import Samples, link_text
from uncut_mpi.model.costs import HELD, Disk, GemmShape
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.net import NetSample
from uncut_mpi.model.ports import Net
from uncut_mpi.units import bytes_text

_MOST_PAIRS: Final = 12
_MOST_FLOWS: Final = 8


def machine_text(machine: Machine) -> str:
    """Return the matrices of a machine, its rates and what it consumes."""
    lines = [f"# {machine.name}, key {machine.key}", f"# {machine.provenance}", ""]
    lines += _matrix(machine, "bandwidth of one transfer, GB/s (row to column)", machine.bandwidth_gb_per_s, "{:.1f}")
    lines += _matrix(machine, "latency of one transfer, us (row to column)", machine.latency_s * 1e6, "{:.2f}")
    lines.append("rate of a large product, TFLOP/s by rank")
    lines += [f"  {name:>5} {_numbers(rate, '{:.3g}')}" for name, rate in machine.gemm_tflop_per_s.items()]
    lines.append("")
    if machine.ports:
        lines.append("ports: what transfers share (capacity, links with a weight that is not 1 in brackets)")
        for port in machine.ports:
            links = zip(port.links, port.weights, strict=True)
            text = ", ".join(
                link_text(link, machine.host) + ("" if weight == 1 else f" [{weight:.2f}]") for link, weight in links
            )
            lines.append(f"  {port.name}: {port.capacity_gb_per_s:.1f} GB/s: {text}")
        lines.append("")
    if machine.busy_watts.any():
        lines.append(f"power at rest {_numbers(machine.idle_watts, '{:.0f}')} W, in a product "
                     f"{_numbers(machine.busy_watts, '{:.0f}')} W, between products "
                     f"{_numbers(machine.active_watts, '{:.0f}')} W")  # fmt: skip
    return "\n".join(lines) + "\n"


def disk_text(disk: Disk, folder: str) -> str:
    """Return what was measured of a folder's disk."""
    return (
        f"disk of {folder}, all ranks at once: reads {disk.read_gb_per_s:.2f} GB/s, writes "
        f"{disk.write_gb_per_s:.2f} GB/s, {disk.call_s * 1e6:.0f} us for each run of bytes besides\n"
    )


def net_text(samples: Sequence[NetSample], net: Net) -> str:
    """Return what was measured between nodes, and the net that it makes."""
    lines = ["net between nodes, messages through host memory: rates of all at once, without their latency"]
    for one in samples:
        flows = ", ".join(link_text(flow, -1) for flow in one.flows[:_MOST_FLOWS])
        more = f" and {len(one.flows) - _MOST_FLOWS} more" if len(one.flows) > _MOST_FLOWS else ""
        lines.append(
            f"  {one.kind}, {bytes_text(one.nbytes)} each: {one.median_s * 1e6:.1f} us, "
            f"{one.rate_gb_per_s(net.latency_s):.3g} GB/s; ranks {flows}{more}"
        )
    lines.append(
        f"latency {net.latency_s * 1e6:.1f} us, adapters {net.adapters} of {net.gb_per_s:.3g} GB/s each way at best, "
        f"{net.typical_gb_per_s:.3g} where all nodes send and receive"
    )
    return "\n".join(lines) + "\n"


def samples_text(samples: Samples, machine: Machine) -> str:
    """Return what a whole calibration adds to `machine_text`."""
    lines = []
    for one in host_totals(samples):
        lines.append(
            f"host, {len(one.ranks)} active ({', '.join(map(str, one.ranks))}): "
            f"in {one.inward:.1f}, out {one.outward:.1f}, both ways {one.both[0]:.1f} + {one.both[1]:.1f} GB/s"
        )
    for kind in ("egress", "ingress"):
        for star in samples.of_kind(kind):
            lines.append(f"device {star.hub} {kind}: {star.total_gb_per_s:.1f} GB/s in all")
    slow = sorted(slowdowns(samples, machine.bandwidth_gb_per_s, machine.latency_s).items(), key=lambda item: -item[1])
    shown = [(pair, factor) for pair, factor in slow if factor > 1.1]
    lines.append(
        f"pairs of links: {len(slow)} measured well enough, {len(shown)} slow each other down by more than 10 %"
    )
    lines += [
        f"  {link_text(pair[0], machine.host)} with {link_text(pair[1], machine.host)}: x {factor:.2f}"
        for pair, factor in shown[:_MOST_PAIRS]
    ]
    if len(shown) > _MOST_PAIRS:
        lines.append(f"  and {len(shown) - _MOST_PAIRS} more, see the file")
    for way, table in (
        ("between devices", machine.row_rates.device),
        ("from the host", machine.row_rates.host_in),
        ("to the host", machine.row_rates.host_out),
        ("within devices", machine.row_rates.local),
    ):
        if table:
            shares = ", ".join(f"{width / 1024:g}: {100 * share:.0f}" for width, share in table)
            lines.append(f"copies {way} in rows of so many KiB get, % of the rate of contiguous ones: {shares}")
    _, shapes, errors = fit_products(samples)
    for dtype, shape in shapes.items():
        blocks = f"blocks of {shape.block_rows:g}×{shape.block_cols:g}" + ("" if shape.waves else ", no waves")
        if shape.block_rows == shape.block_cols == 1:
            blocks = "no blocks"
        lines.append(
            f"{dtype} products: {blocks}, half rate at k = {shape.half_depth:.0f}, {shape.overhead_s * 1e6:.1f} us to "
            f"start, at the end idle for {1e-3 * shape.tail_elements:.0f} thousand elements, C at "
            f"{_c_rate(shape)}, {shape.uneven:.0%} longer where C is uneven, {shape.misaligned:.0%} where columns "
            f"are not aligned, a second product uses {shape.idle_use:.0%} of what one leaves idle, a copy within the "
            f"device takes {shape.copy_share:.0%} of it, a sum waits for {_sum_wait(shape)}, at length they take "
            f"{shape.sustained - 1:.0%} longer; the fit is off by {100 * errors[dtype]:.1f} %"
        )
    for kind, rates in (("", machine.combine_gb_per_s), (" of half types", machine.half_combine_gb_per_s)):
        lines.append(f"COMBINE{kind} {_numbers(rates, '{:.0f}')} GB/s read and written, by rank")
    if samples.beside:
        large, small, together = (1e6 * samples.beside[name] for name in ("large", "small", "together"))
        how = "one after another" if samples.serial_copies else "together"
        lines.append(
            f"copies of a device to others run {how}: large ones {large:.0f} us, small ones there and back "
            f"{small:.0f} us, both at once {together:.0f} us"
        )
    costs = dataclasses.asdict(machine.costs)
    lines.append("costs, us: " + ", ".join(f"{name[:-2]} {value * 1e6:.2f}" for name, value in costs.items()))
    lines.append(_verdict(samples))
    imprecise = sum(not one.precise for one in samples.summaries)
    lines.append(
        f"{len(samples.summaries)} probes, {imprecise} of them without a 95 % interval within 5 % of the mean"
        + "".join(f"; left out for lack of time: {one}" for one in samples.left_out)
    )
    return "\n".join(lines) + "\n"


def refinement_text(refinement: Refinement) -> str:
    """Return what whole products have changed and how well they are predicted."""
    moved = []
    for name, value in refinement.parameters.items():
        if name.startswith("rate") or name.endswith("ports"):
            moved.append(f"{name} x {value:.2f}")
        else:
            moved.append(f"{name} + {value * 1e6:.1f} us")
    return (
        f"rehearsal: {len(refinement.errors)} products, predicted within {refinement.median_error:.1%} in the median "
        f"and {refinement.worst_error:.1%} at worst ({refinement.worst_product}), with {', '.join(moved)}\n"
    )


def _verdict(samples: Samples) -> str:
    if not samples.litmus:
        return "litmus of flags and copies: one rank has no peer"
    wrong = samples.litmus["wrong_words"]
    return (
        f"litmus of flags and copies: {samples.litmus['rounds']} blocks, {wrong} wrong words: "
        f"{'FAIL' if wrong else 'PASS'}"
    )


def _matrix(machine: Machine, title: str, table: np.ndarray, form: str) -> list[str]:
    names = ["host" if end == machine.host else str(end) for end in range(len(table))]
    cells = [[form.format(value) for value in row] for row in table.tolist()]
    cells[machine.host][machine.host] = "-"  # from the host to the host nothing is sent
    width = max(5, *(len(cell) for row in cells for cell in row)) + 2
    lines = [title, " " * 6 + "".join(name.rjust(width) for name in names)]
    lines += [
        name.rjust(6) + "".join(cell.rjust(width) for cell in row) for name, row in zip(names, cells, strict=True)
    ]
    return [*lines, ""]


def _sum_wait(shape: GemmShape) -> str:
    return "its end" if shape.sum_wait >= HELD else f"{shape.sum_wait:.2f} times what a block takes"


def _c_rate(shape: GemmShape) -> str:
    if not shape.c_s_per_byte:
        return "no cost"
    hidden = f", half of it hidden at k = {shape.c_half_depth:.0f}" if shape.c_half_depth else ""
    return f"{1e-9 / shape.c_s_per_byte:.0f} GB/s{hidden}"


def _numbers(values: np.ndarray, form: str) -> str:
    return " ".join(form.format(value) for value in values.tolist())
