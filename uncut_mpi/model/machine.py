"""
What was measured about a machine: links, GEMM rates, memory.

A `Machine` is the only thing through which measured facts reach a planner.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from uncut_mpi.errors import ParamError, TopologyError
from uncut_mpi.model.dtypes import DType

FORMAT_VERSION: Final = 2


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Machine:
    """
    A node of ranks, each with one device, and the host memory they share.

    Locations are numbered 0 … num_ranks−1 for the devices and num_ranks for the host.

    Attributes
    ----------
    name : str
        Printed in plans and reports.
    key : str
        Identifies the hardware; a machine is used only where the key is the same.
    bandwidth_gb_per_s : ndarray of float64, shape (num_ranks+1, num_ranks+1)
        [source, destination], 1e9 bytes per second, the best seen, one transfer at a time.
    latency_s : ndarray of float64, shape (num_ranks+1, num_ranks+1)
        [source, destination], time of a transfer of few bytes.
    gemm_tflop_per_s : mapping of str to ndarray of float64, shape (num_ranks,)
        Best rate of one large product per dtype name.
    typical_gemm_tflop_per_s : mapping of str to ndarray of float64, shape (num_ranks,)
        Rate to expect of it, with all ranks computing at once.
    shared_host_gb_per_s : ndarray of float64, shape (num_ranks, 2)
        Bandwidth to expect from the host to each device and back (1e9 bytes per second), with all
        ranks copying at once in that direction.
    memory_bytes : ndarray of int64, shape (num_ranks,)
        Device memory of each rank.
    provenance : str
        Who measured it, how and when.
    steady : bool
        False if the machine was busy with something else, so that a later measurement is worth more.

    Notes
    -----
    A bound takes the best rates, which nothing beats; a planner those to expect.
    """

    name: str
    key: str
    bandwidth_gb_per_s: np.ndarray
    latency_s: np.ndarray
    gemm_tflop_per_s: Mapping[str, np.ndarray]
    typical_gemm_tflop_per_s: Mapping[str, np.ndarray]
    shared_host_gb_per_s: np.ndarray
    memory_bytes: np.ndarray
    provenance: str = ""
    steady: bool = True

    def __post_init__(self) -> None:
        size = self.num_ranks + 1
        for name in ("bandwidth_gb_per_s", "latency_s"):
            table = getattr(self, name)
            if table.shape != (size, size):
                raise ParamError(f"{name} of machine {self.name} has shape {table.shape}, expected {(size, size)}")
            if not (np.isfinite(table).all() and (table >= 0).all()):
                raise ParamError(f"{name} of machine {self.name} has a negative or non-finite entry")
            table.flags.writeable = False
        off_diagonal = ~np.eye(size, dtype=bool)
        if (self.bandwidth_gb_per_s[off_diagonal] <= 0).any():
            raise ParamError(f"machine {self.name} has a link without bandwidth")
        shared = self.shared_host_gb_per_s
        if shared.shape != (self.num_ranks, 2) or not (np.isfinite(shared).all() and (shared > 0).all()):
            raise ParamError(
                f"shared_host_gb_per_s of machine {self.name} is not {self.num_ranks} pairs of positive bandwidths"
            )
        shared.flags.writeable = False
        for name in ("gemm_tflop_per_s", "typical_gemm_tflop_per_s"):
            for dtype, rate in getattr(self, name).items():
                if rate.shape != (self.num_ranks,) or not (rate > 0).all():
                    raise ParamError(f"{name}[{dtype}] of machine {self.name} is not {self.num_ranks} positive rates")

    @property
    def num_ranks(self) -> int:
        """Ranks (devices) of the machine."""
        return len(self.memory_bytes)

    @property
    def host(self) -> int:
        """Index of the host location."""
        return self.num_ranks

    def gemm_rate(self, dtype: DType) -> np.ndarray:
        """
        Return the best flop/s of each rank for one type, shape (num_ranks,).

        Raises
        ------
        TopologyError
            If the machine was measured without that type.
        """
        return self._rate(self.gemm_tflop_per_s, dtype)

    def typical_gemm_rate(self, dtype: DType) -> np.ndarray:
        """
        Return the flop/s to expect of each rank for one type, shape (num_ranks,).

        Raises
        ------
        TopologyError
            If the machine was measured without that type.
        """
        return self._rate(self.typical_gemm_tflop_per_s, dtype)

    def _rate(self, rates: Mapping[str, np.ndarray], dtype: DType) -> np.ndarray:
        rate = rates.get(dtype.name)
        if rate is None:
            raise TopologyError(f"machine {self.name} has no GEMM rate for {dtype.name}: measure it again")
        flops: np.ndarray = rate * 1e12
        return flops

    def links(self, *, host_shared: bool) -> np.ndarray:
        """
        Return the bandwidths to plan with, as `bandwidth_gb_per_s`.

        Parameters
        ----------
        host_shared : bool
            Whether all ranks use their host links at once.
        """
        table: np.ndarray = self.bandwidth_gb_per_s.copy()
        if host_shared:
            table[self.host, : self.host], table[: self.host, self.host] = self.shared_host_gb_per_s.T
        return table

    @classmethod
    def uniform(
        cls,
        num_ranks: int,
        *,
        name: str = "uniform",
        link_gb_per_s: float = 390.0,
        host_gb_per_s: float = 50.0,
        latency_s: float = 5e-6,
        gemm_tflop_per_s: Mapping[str, float] | None = None,
        memory_bytes: int = 140 * 10**9,
    ) -> Machine:
        """Return a machine of equal devices and equal links, for tests and for planning without a measurement."""
        size = num_ranks + 1
        bandwidth = np.full((size, size), link_gb_per_s)
        bandwidth[num_ranks, :] = bandwidth[:, num_ranks] = host_gb_per_s
        np.fill_diagonal(bandwidth, 4.0 * link_gb_per_s)
        rates = gemm_tflop_per_s or {"f64": 60.0, "f32": 50.0, "f16": 750.0, "bf16": 750.0}
        return cls(
            name=name,
            key=f"{name}-{num_ranks}",
            bandwidth_gb_per_s=bandwidth,
            latency_s=np.full((size, size), latency_s),
            gemm_tflop_per_s={dtype: np.full(num_ranks, rate) for dtype, rate in rates.items()},
            typical_gemm_tflop_per_s={dtype: np.full(num_ranks, rate) for dtype, rate in rates.items()},
            shared_host_gb_per_s=np.full((num_ranks, 2), host_gb_per_s),
            memory_bytes=np.full(num_ranks, memory_bytes, np.int64),
            provenance="assumed, not measured",
        )

    def to_json(self) -> str:
        """Return the machine as JSON text of format `FORMAT_VERSION`."""
        return json.dumps(
            {
                "format": FORMAT_VERSION,
                "name": self.name,
                "key": self.key,
                "provenance": self.provenance,
                "bandwidth_gb_per_s": self.bandwidth_gb_per_s.tolist(),
                "latency_s": self.latency_s.tolist(),
                "gemm_tflop_per_s": {name: rate.tolist() for name, rate in self.gemm_tflop_per_s.items()},
                "typical_gemm_tflop_per_s": {
                    name: rate.tolist() for name, rate in self.typical_gemm_tflop_per_s.items()
                },
                "shared_host_gb_per_s": self.shared_host_gb_per_s.tolist(),
                "steady": self.steady,
                "memory_bytes": self.memory_bytes.tolist(),
            },
            indent=1,
            sort_keys=True,
        )

    @classmethod
    def from_json(cls, text: str) -> Machine:
        """
        Rebuild a machine from `to_json`'s text.

        Raises
        ------
        ParamError
            If the text is not a machine file of this format.
        """
        try:
            data: dict[str, Any] = json.loads(text)
            found = data["format"]
            if found != FORMAT_VERSION:
                raise ParamError(f"machine file format {found} was found, this version reads {FORMAT_VERSION}")
            return cls(
                name=data["name"],
                key=data["key"],
                provenance=data["provenance"],
                bandwidth_gb_per_s=np.array(data["bandwidth_gb_per_s"], np.float64),
                latency_s=np.array(data["latency_s"], np.float64),
                gemm_tflop_per_s=_rates(data["gemm_tflop_per_s"]),
                typical_gemm_tflop_per_s=_rates(data["typical_gemm_tflop_per_s"]),
                shared_host_gb_per_s=np.array(data["shared_host_gb_per_s"], np.float64),
                steady=bool(data["steady"]),
                memory_bytes=np.array(data["memory_bytes"], np.int64),
            )
        except ParamError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise ParamError(f"not a machine file: {type(error).__name__}: {error}") from None


def _rates(data: dict[str, list[float]]) -> dict[str, np.ndarray]:
    return {name: np.array(rate, np.float64) for name, rate in data.items()}
