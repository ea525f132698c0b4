"""The calibration: from a command line to a machine file on disk."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import uncut_mpi
from uncut_mpi.api.measure import cache_directory, kept_disk, machine_key, measure
from uncut_mpi.api.session import Session
from uncut_mpi.api.start import Started, start_backend
from uncut_mpi.calibration.assemble import assemble
from uncut_mpi.calibration.disk import check_folder, measure_disk
from uncut_mpi.calibration.effort import EFFORTS
from uncut_mpi.calibration.measuring import measure_all
from uncut_mpi.calibration.refine import Refinement, refine
from uncut_mpi.calibration.report import disk_text, machine_text, refinement_text, samples_text
from uncut_mpi.calibration.samples import Samples
from uncut_mpi.command.artifacts import check_paths, write_file, written_by
from uncut_mpi.command.calibrate_arguments import CalibrateArguments
from uncut_mpi.command.entry import Say
from uncut_mpi.command.progress import ProgressBar
from uncut_mpi.command.rehearsal import rehearse
from uncut_mpi.errors import DataFileError, TopologyError, UncutError, reason
from uncut_mpi.model.machine import Machine
from uncut_mpi.regular import read_regular
from uncut_mpi.spmd import agreement
from uncut_mpi.spmd.group import Group
from uncut_mpi.spmd.runtime import library_version

_MOST_BYTES = 1 << 28


def run_calibration(comm: Any, arguments: CalibrateArguments, words: Sequence[str], say: Say) -> bool:
    """
    Measure, describe and keep a machine; return whether the litmus passed, the same on every rank. Collective.

    Raises
    ------
    UncutError
        The same on every rank.
    """
    group = Group(comm)
    try:
        with agreement.collective(group, "checking the output"):
            if group.num_nodes > 1:
                raise TopologyError(
                    f"the {group.size} ranks are on {group.num_nodes} nodes: calibrate one, of which sessions and "
                    "Machine.cluster compose several"
                )
            if group.rank == 0:
                check_paths(written_by(arguments))
                if arguments.disk is not None:
                    check_folder(arguments.disk)
        began = time.perf_counter()
        started = start_backend(group, **arguments.of_ranks)
        samples: Samples | None = None
        try:
            key = machine_key(started.identities)
            if arguments.quick:
                machine = measure(group, started.backend, started.identities, key)
            else:
                samples, machine = _thorough(group, started, key, arguments)
        except BaseException:
            with contextlib.suppress(UncutError):  # what went wrong is on its way already
                started.backend.close()
            raise
        started.backend.close()
        passed = samples is None or not samples.litmus.get("wrong_words")
        if arguments.disk is not None:
            machine = dataclasses.replace(machine, disk=measure_disk(group, arguments.disk))
        refinement: Refinement | None = None
        if samples is not None and passed:
            machine, refinement = _rehearse(comm, group, machine, arguments)
        took_s = time.perf_counter() - began
        with agreement.collective(group, "keeping the machine"):
            if group.rank == 0:
                _publish(machine, samples, refinement, arguments, say, keep=passed, took_s=took_s)
        return passed
    finally:
        group.free()


def _rehearse(comm: Any, group: Group, machine: Machine, arguments: CalibrateArguments) -> tuple[Machine, Refinement]:
    """Run whole products with the machine and fit it to their times. Collective."""
    with Session(comm, machine=machine, **arguments.of_ranks) as session:
        observations = rehearse(session, _progress(group, "rehearsing"))

    def fit() -> tuple[str, Refinement]:
        fitted, found = refine(machine, observations)
        return fitted.to_json(), found

    text, found = group.from_root(fit)
    return Machine.from_json(text), found


def _progress(group: Group, title: str) -> Callable[[int, int, str], None]:
    """Return what shows how far it is: a bar on rank 0, nothing elsewhere."""
    return ProgressBar(title).show if group.rank == 0 else lambda done, total, what: None


def _thorough(group: Group, started: Started, key: str, arguments: CalibrateArguments) -> tuple[Samples, Machine]:
    samples = measure_all(
        group,
        started.backend,
        started.identities,
        EFFORTS[started.backend.name],
        time_limit_s=arguments.time_limit_s,
        progress=_progress(group, "calibrating"),
    )
    identities = started.identities

    when = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    made = f"calibrated by uncut_mpi {uncut_mpi.__version__} on {platform.node()}, {when}, {library_version()}"
    text = group.from_root(
        lambda: assemble(
            samples,
            name=f"{group.size}×{identities[0].name}",
            key=key,
            memory_bytes=[one.memory_bytes for one in identities],
            models=[one.name for one in identities],
            provenance=made,
        ).to_json()
    )
    return samples, Machine.from_json(text)


def _publish(
    machine: Machine,
    samples: Samples | None,
    refinement: Refinement | None,
    arguments: CalibrateArguments,
    say: Say,
    *,
    keep: bool,
    took_s: float,
) -> None:
    """Describe the machine and write its file; on one rank."""
    path = arguments.output
    where = path or str(cache_directory() / f"{machine.key}.json")
    if arguments.disk is None:  # what was measured of it stays
        machine = dataclasses.replace(machine, disk=kept_disk(where))
    content: dict[str, Any] = json.loads(machine.to_json())
    say(machine_text(machine))
    if arguments.disk is not None:
        say(disk_text(machine.disk, arguments.disk))
    if samples is not None:
        content["samples"] = samples.to_dict()
        say(samples_text(samples, machine))
    if refinement is not None:
        say(refinement_text(refinement))
        content["rehearsal"] = {
            "parameters": dict(refinement.parameters),
            "errors": dict(zip(refinement.products, refinement.errors, strict=True)),
        }
    text = json.dumps(content, indent=1, sort_keys=True) + "\n"
    lines = []
    if keep:
        whole = samples is None and _is_whole(where)
        if path is None:
            _make_folder(os.path.dirname(where))
        write_file("the machine file" if path is None else "--output", where, text.encode())
        lines.append(f"kept in {where}, measured in {took_s:.1f} s")
        if not machine.steady:
            lines.append(
                "the machine was busy with something else: these figures are not steady, and what they bound may be "
                "beaten. Calibrate again when it is quiet; sessions that find this file measure again until then"
            )
        if whole:
            lines.append("it takes the place of a whole calibration: run that again for what transfers share")
    else:
        lines.append(
            "a reader saw other words than were pushed before the flag: this machine cannot run products, and nothing "
            "was kept"
        )
    if samples is None:
        lines.append("this is the quick form, as at first use: leave out --quick to measure what transfers share too")
    say("".join(f"{line}\n" for line in lines))
    write_file("--json", arguments.json_path, text.encode())  # last: what took a minute is kept, whatever this does


def _is_whole(path: str) -> bool:
    """Whether a file is a machine that was measured in the whole form."""
    try:
        return "samples" in json.loads(read_regular(path, _MOST_BYTES))
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def _make_folder(path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise DataFileError(
            f"the machine cannot be kept in {path}: {reason(error)}; set XDG_CACHE_HOME, or name a file with --output"
        ) from None
