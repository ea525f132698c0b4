"""
Schedulers that other packages, or the benchmarks, bring along: found by their names, never tried by a search.

A distribution that brings one names a `Scheduler` under the entry points of the group `GROUP`. So do the schedulers of
other papers, which come with the benchmarks (`uncut_mpi.bench.rivals`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from uncut_mpi.errors import ParamError
from uncut_mpi.model.arguments import shown

if TYPE_CHECKING:
    from uncut_mpi.planning.options import ScheduleOptions
    from uncut_mpi.planning.schedule import Schedule

GROUP: Final = "uncut_mpi.schedulers"


@dataclasses.dataclass(frozen=True, slots=True)
class Scheduler:
    """
    A scheduler of products.

    Attributes
    ----------
    make : callable
        Returns a schedule and the options with what was chosen, of ``(setting, most_tasks=N)``, of which the first is a
        `uncut_mpi.planning.setting.Setting`. Pure and deterministic; errors are those of
        `uncut_mpi.planning.planner.plan`.
    takes : tuple of str
        Names of the options that it takes, those of `Blocking` as ``"blocking.slots"``.
    describe : callable
        Returns in words how such a schedule, made with such options, divides its problem.
    variants : tuple of str
        What may follow its name, as ``"name:variant"``.
    """

    make: Callable[..., tuple[Schedule, ScheduleOptions]]
    takes: tuple[str, ...]
    describe: Callable[[Schedule, ScheduleOptions], str]
    variants: tuple[str, ...] = ()


def names() -> tuple[str, ...]:
    """Return the names of those that are installed."""
    return tuple(_found())


def other(scheduler: str) -> Scheduler:
    """
    Return the scheduler of a name, or of ``"name:variant"``.

    Raises
    ------
    ParamError
        If none is installed that is called so.
    """
    name, _, variant = scheduler.partition(":")
    if name not in _found():
        known = ", ".join(("uncut", "kblocks", *names(), "auto"))
        raise ParamError(f"scheduler {shown(scheduler)} does not exist: use one of {known}")
    found = _loaded(name)
    if variant and variant not in found.variants:
        variants = f"one of {', '.join(found.variants)}" if found.variants else "none"
        raise ParamError(f"scheduler {name!r} has no variant {shown(variant)}: use {variants}")
    return found


@functools.cache
def _found() -> Mapping[str, Any]:
    from importlib import metadata  # which takes as long to load as all that a plan needs else

    return {one.name: one for one in metadata.entry_points(group=GROUP)}


@functools.cache
def _loaded(name: str) -> Scheduler:
    loaded: Scheduler = _found()[name].load()
    return loaded
