"""What issuing, waiting and telling take, from chains of small tasks. Collective."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from uncut_mpi.calibration import probes
from uncut_mpi.calibration.probes import SMALL_BYTES, GemmProbe, Transfers
from uncut_mpi.calibration.samples import Samples
from uncut_mpi.calibration.workbench import Workbench
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.locations import host_index

_CHAIN: Final = 100
_EDGE: Final = 64
_LARGE: Final = 4


class Issuing:
    """
    The costs of a machine's tasks beside what they move and compute.

    Parameters
    ----------
    bench : Workbench
        Where they are timed.
    samples : Samples
        What was measured before, and takes what is found.
    bandwidth, latency : ndarray of float64, shape (num_ranks+1, num_ranks+1)
        Of every link by itself (GB/s, s).
    """

    def __init__(self, bench: Workbench, samples: Samples, bandwidth: np.ndarray, latency: np.ndarray) -> None:
        self.bench, self.samples, self._bandwidth, self._latency = bench, samples, bandwidth, latency

    def measure(self, what: str, *, asynchronous: bool) -> None:
        """Fill in `Samples.costs` and `Samples.beside`; unless `asynchronous` the time to issue is the time to run."""
        areas, costs = self.bench.areas, self.samples.costs
        hop_s, hop_issue_s = self._each(probes.hops(areas, [0], _CHAIN), what)
        costs["event_latency_s"] = max(0.0, hop_s - float(self._latency[0, 0]))
        if areas.num_ranks > 1:
            flag_s, _ = self._each(probes.hops(areas, [0, 1], _CHAIN), what)
            pushed = 0.5 * float(self._latency[0, 1] + self._latency[1, 0])
            costs["flag_latency_s"] = max(0.0, flag_s - pushed)
        if not asynchronous:
            return
        _, (copy_s, *_) = self._each(probes.transfers(areas, [Transfers((0, 0), _CHAIN, SMALL_BYTES)]), what)
        _, (gemm_s, *_) = self._each(probes.products(areas, GemmProbe((64, 64, 64)), DType.f64, _CHAIN), what)
        start_s, (combine_s, *_) = self._each(probes.combines(areas, _EDGE, _EDGE, DType.f64, _CHAIN), what)
        costs |= {"copy_s": copy_s, "gemm_s": gemm_s, "combine_s": combine_s, "combine_start_s": start_s}
        self._handing_over(what)
        # A hop is a copy, an event recorded and an event awaited.
        costs["event_s"] = 0.5 * max(0.0, hop_issue_s[0] - copy_s)
        if areas.num_ranks > 1:
            _, (signal_s, wait_s, *_) = self._each(probes.signalled(areas, _CHAIN), what)
            costs |= {"signal_s": max(0.0, signal_s - copy_s), "wait_s": max(0.0, wait_s - copy_s)}
            self._lane_costs(what)
            self._beside(what, costs["flag_latency_s"] + pushed)

    def _each(self, probe: probes.Probe, what: str) -> tuple[float, list[float]]:
        """Return what one task of a chain takes, and what each rank takes to issue one (s)."""
        timed = self.bench.time(probe, what)
        return timed.together.median_s / _CHAIN, (timed.issue_s / _CHAIN).tolist()

    def _handing_over(self, what: str) -> None:
        """
        Time how soon a COMBINE begins after a COMBINE, and one of a COMBINE and a copy after the other.

        A copy takes what one behind another was found to take, so that a chain of both is simulated as it was timed.
        """
        areas = self.bench.areas
        kernels_s, both_s = (
            self._each(probes.turns(areas, _EDGE, _CHAIN, copies=copies), what)[0] for copies in (False, True)
        )
        costs, alone_s = self.samples.costs, self.samples.costs["combine_start_s"]
        costs["kernel_latency_s"] = max(0.0, kernels_s - alone_s)
        costs["engine_latency_s"] = 0.5 * max(
            0.0, both_s - alone_s - float(self._latency[host_index(areas.num_ranks), 0])
        )

    def _lane_costs(self, what: str) -> None:
        """Time what waiting for a flag that is there and writing one take of a lane."""
        areas, costs = self.bench.areas, self.samples.costs
        with_waits, without = (
            self.bench.time(probes.waiting(areas, _CHAIN, waits=waits), what).by_rank_s for waits in (True, False)
        )
        costs["wait_lane_s"] = max(0.0, float(with_waits[1] - without[1]) / _CHAIN)
        costs["signal_lane_s"] = max(0.0, float(with_waits[0] - without[0]) / _CHAIN)

    def _beside(self, what: str, hop_s: float) -> None:
        """Find out whether a device serves its copies to others one after another."""
        areas = self.bench.areas
        large_s = _LARGE * areas.nbytes / (1e9 * float(self._bandwidth[0, 1]))
        small_ones = max(_LARGE, math.ceil(0.5 * large_s / hop_s))
        cases = {"large": (_LARGE, 0), "small": (0, small_ones), "together": (_LARGE, small_ones)}
        for name, (large, small) in cases.items():
            self.samples.beside[name] = self.bench.time(probes.beside(areas, large, small), what).together.median_s
