"""Calibrations that take as little time as they can."""

from __future__ import annotations

import dataclasses

from uncut_mpi.api import measure as measuring
from uncut_mpi.calibration import litmus, power
from uncut_mpi.calibration.effort import EFFORTS
from uncut_mpi.command import rehearsal
from uncut_mpi.model.dtypes import DType


def make_small(monkeypatch, folder):
    """Take small probes and products on the host backend, and keep machines in a folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    effort = dataclasses.replace(
        EFFORTS["host"],
        area_bytes=64 << 10,
        target_s=1e-4,
        widths_bytes=(64, 4096),
        device_widths_bytes=(512,),
        shapes=((16, 16, 16), (32, 32, 32), (32, 32, 64), (64, 64, 64)),
        added=((32, 32, 16), (64, 64, 32)),
        combine=(32, 32),
        litmus_bytes=(4096,),
    )
    monkeypatch.setitem(EFFORTS, "host", effort)
    monkeypatch.setattr(litmus, "_MOST_BLOCKS", 2)
    monkeypatch.setattr(power, "_IDLE_S", 0.01)
    edges = {DType.f64: (32, 64, 96, 128), DType.f32: (128,), DType.f16: (64,)}
    monkeypatch.setitem(rehearsal._EDGES, "host", edges)
    every = rehearsal.products_of
    monkeypatch.setattr(rehearsal, "products_of", lambda *given: every(*given)[::3])  # of each type, and a tiny one
    for name, value in (("_TINY", 16), ("_WARMUP", 1), ("_CALLS", 3)):
        monkeypatch.setattr(rehearsal, name, value)
    monkeypatch.setitem(measuring._PROBE_BYTES, "host", 256 << 10)
    monkeypatch.setitem(measuring._GEMM_EDGE, "host", 64)
    monkeypatch.setattr(measuring, "_SAMPLE_S", 1e-4)
