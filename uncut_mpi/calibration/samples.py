"""What a calibration has measured, before anything is fitted to it. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

from uncut_mpi.calibration.probes import GemmProbe
from uncut_mpi.calibration.statistics import Summary

Link = tuple[int, int]

_TELLING_WIDTH: Final = 0.25
_MOST_UNSTEADY: Final = 0.5
"""Part of the probes that may scatter on a machine that does nothing else: beside another job nearly all of them do."""


def link_text(link: Link, host: int, device: str = "") -> str:
    """Return a link in words, as ``0 to host``; `host` is the number that the host has, `device` goes before others."""
    return " to ".join("host" if end == host else f"{device}{end}" for end in link)


def are_steady(summaries: Sequence[Summary]) -> bool:
    """Return whether what was timed had the machine for itself, as far as times tell."""
    return sum(one.unsteady for one in summaries) <= _MOST_UNSTEADY * len(summaries)


@dataclasses.dataclass(frozen=True, slots=True)
class TransferSample:
    """
    Transfers at once.

    Attributes
    ----------
    kind : str
        ``"alone"``, ``"small"`` (few bytes), ``"both ways"``, ``"egress"``, ``"ingress"``, ``"host"``, ``"rows"``
        or ``"pair"``.
    links : tuple of (int, int)
        (source, destination), the host being the number of ranks.
    counts : tuple of int
        Copies on each.
    nbytes : tuple of int
        Bytes on each, all its copies together.
    width_bytes : int
        Width of the rows; 0 for contiguous copies.
    time : Summary
        From the first one's start to the last one's end.
    """

    kind: str
    links: tuple[Link, ...]
    counts: tuple[int, ...]
    nbytes: tuple[int, ...]
    width_bytes: int
    time: Summary

    @property
    def seconds(self) -> float:
        """The time that is believed: the median, since what disturbs a transfer only ever makes it longer."""
        return self.time.median_s

    @property
    def hub(self) -> int:
        """The device that sends all of ``"egress"``, or receives all of ``"ingress"``."""
        return self.links[0][self.kind == "ingress"]

    @property
    def telling(self) -> bool:
        """Whether the mean is known well enough to say anything about what transfers share."""
        return self.time.half_width_s <= _TELLING_WIDTH * self.time.mean_s

    @property
    def rates_gb_per_s(self) -> tuple[float, ...]:
        """Bytes of each link by the time of all."""
        return tuple(nbytes / self.seconds / 1e9 for nbytes in self.nbytes)

    @property
    def best_gb_per_s(self) -> tuple[float, ...]:
        """The same in the shortest time: what is possible."""
        return tuple(nbytes / self.time.min_s / 1e9 for nbytes in self.nbytes)

    @property
    def total_gb_per_s(self) -> float:
        """All bytes by the time."""
        return sum(self.rates_gb_per_s)


@dataclasses.dataclass(frozen=True, slots=True)
class ProductSample:
    """
    Products on all devices at once.

    Attributes
    ----------
    dtype : str
        Name of the type.
    product : GemmProbe
        What was timed.
    seconds : tuple of float
        Median time of one product on each rank.
    time : Summary
        Of one product, from the first rank's start to the last one's end.
    """

    dtype: str
    product: GemmProbe
    seconds: tuple[float, ...]
    time: Summary


@dataclasses.dataclass(slots=True)
class Samples:
    """
    All of a calibration.

    Attributes
    ----------
    num_ranks : int
        Ranks, one device each.
    multiprocessors : list of int
        Of each device.
    transfers : list of TransferSample
        In the order of measurement.
    products : list of ProductSample
        Likewise.
    combine_gb_per_s : list of float
        Bytes read and written by COMBINE per second on each device (1e9).
    half_combine_gb_per_s : list of float
        The same where C is float16.
    costs : dict of str to float
        Fields of `IssueCosts`.
    beside : dict of str to float
        Time (s) of large copies and of a small copy's ways there and back between the same devices. ``"large"`` and
        ``"small"`` are alone, ``"together"`` at once on lanes of their own. Empty if not measured.
    within : dict of str to dict of str to float
        By type, time (s) of products (``"products"``), of copies within the device (``"copies"``), and of both at once
        (``"together"``), on rank 0. Empty if not measured.
    sums : dict of str to dict of str to float
        By type, of some sums beside a product for how long they wait in all (``"waits"``, s) and how many they are
        (``"count"``). Of the product what it takes alone (``"product"``, s) and its steps of k (``"k"``). On rank 0.
        Empty if not measured.
    at_length : dict of str to float
        By type, how many times as long as after a rest products take that go on. Empty if not measured.
    watts : dict of str to list of float
        ``"idle"``, ``"busy"`` and ``"active"`` (between products) of each device; 0 where unknown.
    litmus : dict of str to int
        ``"rounds"`` of pushed blocks and ``"wrong_words"`` that a reader found after the flag; empty for one rank.
    left_out : list of str
        What the time limit left out.
    """

    num_ranks: int
    multiprocessors: list[int]
    transfers: list[TransferSample] = dataclasses.field(default_factory=list)
    products: list[ProductSample] = dataclasses.field(default_factory=list)
    combine_gb_per_s: list[float] = dataclasses.field(default_factory=list)
    half_combine_gb_per_s: list[float] = dataclasses.field(default_factory=list)
    costs: dict[str, float] = dataclasses.field(default_factory=dict)
    beside: dict[str, float] = dataclasses.field(default_factory=dict)
    within: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    sums: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    at_length: dict[str, float] = dataclasses.field(default_factory=dict)
    watts: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    litmus: dict[str, int] = dataclasses.field(default_factory=dict)
    left_out: list[str] = dataclasses.field(default_factory=list)

    def of_kind(self, *kinds: str, telling: bool = False) -> list[TransferSample]:
        """Return the transfers of some kinds; only the `telling` ones if that is asked for."""
        return [one for one in self.transfers if one.kind in kinds and (one.telling or not telling)]

    @property
    def serial_copies(self) -> bool:
        """Whether small copies had to wait for the large ones on another lane, as `Machine.serial_copies`."""
        if not self.beside:
            return False
        return self.beside["together"] > self.beside["large"] + 0.5 * self.beside["small"]

    @property
    def summaries(self) -> list[Summary]:
        """Of all probes."""
        return [one.time for one in self.transfers] + [one.time for one in self.products]

    @property
    def steady(self) -> bool:
        """Whether the machine did nothing else, as far as times tell."""
        return are_steady(self.summaries)

    def to_dict(self) -> dict[str, Any]:
        """Return everything for a JSON file."""
        fields = dataclasses.asdict(self)
        for data, summary in zip((*fields["transfers"], *fields["products"]), self.summaries, strict=True):
            data["time"] = summary.to_dict()
        return fields
