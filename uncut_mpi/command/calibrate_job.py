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
from uncut_mpi.api.lifetime import ranks_per_node_of
from uncut_mpi.api.measure import cache_directory, join_nodes, kept_disk, machine_key, measure
from uncut_mpi.api.net_probe import measure_net
from uncut_mpi.api.session import Session
from uncut_mpi.api.start import Started, start_backend
from uncut_mpi.calibration.assemble import assemble
from uncut_mpi.calibration.disk import check_folder, measure_disk
from uncut_mpi.calibration.effort import EFFORTS, NET_BYTES
from uncut_mpi.calibration.measuring import measure_all
from uncut_mpi.calibration.refine import Refinement, refine
from uncut_mpi.calibration.report import disk_text, machine_text, net_text, refinement_text, samples_text
from uncut_mpi.calibration.samples import Samples, are_steady
from uncut_mpi.calibration.statistics import Summary
from uncut_mpi.command.artifacts import check_paths, write_file, written_by
from uncut_mpi.command.calibrate_arguments import CalibrateArguments
from uncut_mpi.command.entry import Say
from uncut_mpi.command.progress import ProgressBar
from uncut_mpi.command.rehearsal import rehearse
from uncut_mpi.device.interface import DeviceIdentity
from uncut_mpi.errors import DataFileError, ParamError, UncutError, reason
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.net import NetSample, fit_net
from uncut_mpi.regular import read_regular
from uncut_mpi.spmd import agreement
from uncut_mpi.spmd.group import SETTLING_S, Group
from uncut_mpi.spmd.runtime import library_version

_MOST_BYTES = 1 << 28

Progress = Callable[[str], Callable[[int, int, str], None]]
"""Returns what shows how far something is that has a title."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Node:
    """What was measured of a node, the same on all its ranks."""

    machine: Machine  # what it is
    samples: Samples | None  # what that is made of; None of the quick form
    refinement: Refinement | None  # what whole products have changed
    identities: list[DeviceIdentity]  # of its ranks' devices

    @property
    def passed(self) -> bool:
        """Whether the litmus passed, or there was none."""
        return self.samples is None or not self.samples.litmus.get("wrong_words")

    def told(self, disk: str | None) -> str:
        """Return what to say of it."""
        lines = [machine_text(self.machine)]
        if disk is not None:
            lines.append(disk_text(self.machine.disk, disk))
        if self.samples is not None:
            lines.append(samples_text(self.samples, self.machine))
        if self.refinement is not None:
            lines.append(refinement_text(self.refinement))
        return "".join(lines)

    def facts(self) -> dict[str, Any]:
        """Return what its file has beside the machine."""
        found: dict[str, Any] = {}
        if self.samples is not None:
            found["samples"] = self.samples.to_dict()
        if self.refinement is not None:
            found["rehearsal"] = {
                "parameters": dict(self.refinement.parameters),
                "errors": dict(zip(self.refinement.products, self.refinement.errors, strict=True)),
            }
        return found


def run_calibration(comm: Any, arguments: CalibrateArguments, words: Sequence[str], say: Say) -> bool:
    """
    Measure, describe and keep a machine; return whether the litmus passed; the same on every rank. Collective.

    Of several nodes each is measured by its own ranks, all at the same time, and then the net between them.
    """
    each: int | None = None
    with contextlib.suppress(ParamError):  # raised below, on all ranks
        each = ranks_per_node_of(arguments.ranks_per_node)
    with Group(comm, ranks_per_node=each) as group:
        with agreement.collective(group, "checking the output"):
            ranks_per_node_of(arguments.ranks_per_node)
            if arguments.devices and len(arguments.devices) != group.size:
                raise ParamError(
                    f"--devices names {len(arguments.devices)} for {group.size} ranks: name the device of each rank"
                )
            if group.rank == 0:
                check_paths(written_by(arguments))
            if group.local_rank == 0 and arguments.disk is not None:
                check_folder(arguments.disk)
        began = time.perf_counter()

        def progress(title: str) -> Callable[[int, int, str], None]:
            """Return what shows how far it is: a bar on rank 0, nothing elsewhere."""
            return ProgressBar(title).show if group.rank == 0 else lambda done, total, what: None

        with agreement.on_each_node(group, "measuring each node") as within:
            devices = arguments.devices and tuple(arguments.devices[rank] for rank in group.here)
            node = _measure_node(within, dataclasses.replace(arguments, devices=devices), progress)
        # Of each node, told by its first rank.
        told = node.passed, node.told(arguments.disk), node.facts(), node.identities
        every = group.allgather_objects(told, "calibrating", SETTLING_S)
        of_nodes = [every[group.node_of.index(number)] for number in range(group.num_nodes)]
        passed = all(its for its, *_ in of_nodes)
        machine, text, facts = node.machine, of_nodes[0][1], of_nodes[0][2]
        if group.num_nodes > 1:
            samples = _measure_net(group, arguments, progress("measuring the net"))
            identities = [every[rank][3][group.node_of[:rank].count(at)] for rank, at in enumerate(group.node_of)]
            machine = join_nodes(group, machine, machine_key(identities, group.hosts, group.node_of), samples)
            if not (arguments.quick or are_steady([Summary.of(one.seconds) for one in samples])):
                said = f"{machine.provenance}; the net was busy, and its figures are not steady"
                machine = dataclasses.replace(machine, steady=False, provenance=said)
            text = "".join(f"## node {number}\n{of_node[1]}\n" for number, of_node in enumerate(of_nodes))
            text += net_text(samples, fit_net(samples, group.node_of))
            facts = {"nodes": [its for _, _, its, _ in of_nodes], "net": [dataclasses.asdict(one) for one in samples]}
        took_s = time.perf_counter() - began
        with agreement.collective(group, "keeping the machine"):
            if group.rank == 0:
                say(text)
                _publish(machine, facts, arguments, say, keep=passed, took_s=took_s)
            # Nodes that are taken for several are one machine, which has one file.
            first = group.rank == group.machines.index(group.machines[group.rank])
            if first and group.num_nodes > 1 and passed and arguments.output is None:
                _keep_own(node, arguments)
        return passed


def _measure_node(group: Group, arguments: CalibrateArguments, progress: Progress) -> _Node:
    """Measure the ranks of one node. Collective."""
    of_ranks = {name: value for name, value in arguments.of_ranks.items() if name != "ranks_per_node"}
    started = start_backend(group, **of_ranks)
    samples: Samples | None = None
    refinement: Refinement | None = None
    try:
        key = machine_key(started.identities, group.hosts, group.node_of)
        if arguments.quick:
            machine = measure(group, started.backend, started.identities, key)
        else:
            samples, machine = _thorough(group, started, key, arguments.time_limit_s, progress("calibrating"))
    except BaseException:
        with contextlib.suppress(UncutError):  # what went wrong is on its way already
            started.backend.close()
        raise
    started.backend.close()
    if arguments.disk is not None:
        machine = dataclasses.replace(machine, disk=measure_disk(group, arguments.disk))
    node = _Node(machine, samples, refinement, started.identities)
    if samples is None or not node.passed:
        return node
    # A node is all that this session knows, whatever the environment says.
    with Session(group.messages, machine=machine, ranks_per_node=group.size, **of_ranks) as session:
        observations = rehearse(session, progress("rehearsing"))

    def fit() -> tuple[str, Refinement]:
        fitted, found = refine(machine, observations)
        return fitted.to_json(), found

    fitted, refinement = group.from_root(fit)
    return dataclasses.replace(node, machine=Machine.from_json(fitted), refinement=refinement)


def _measure_net(
    group: Group, arguments: CalibrateArguments, progress: Callable[[int, int, str], None]
) -> list[NetSample]:
    if arguments.quick:
        return measure_net(group)  # in no time
    return measure_net(
        group,
        sizes=NET_BYTES,
        whole=True,
        enough=lambda seconds: Summary.of(seconds).precise,
        time_limit_s=arguments.time_limit_s,
        progress=progress,
    )


def _thorough(
    group: Group, started: Started, key: str, time_limit_s: float, progress: Callable[[int, int, str], None]
) -> tuple[Samples, Machine]:
    samples = measure_all(
        group,
        started.backend,
        started.identities,
        EFFORTS[started.backend.name],
        time_limit_s=time_limit_s,
        progress=progress,
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
    facts: dict[str, Any],
    arguments: CalibrateArguments,
    say: Say,
    *,
    keep: bool,
    took_s: float,
) -> None:
    """Write the machine's file, with what it is made of, and say so; on one rank."""
    path = arguments.output
    where = path or _kept_at(machine)
    if arguments.disk is None:  # what was measured of it stays
        machine = dataclasses.replace(machine, disk=kept_disk(where))
    text = _file_text(machine, facts)
    lines = []
    if keep:
        whole = arguments.quick and _is_whole(where)
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
    if arguments.quick:
        lines.append("this is the quick form, as at first use: leave out --quick to measure what transfers share too")
    say("".join(f"{line}\n" for line in lines))
    write_file("--json", arguments.json, text.encode())  # last: what took a minute is kept, whatever this does


def _keep_own(node: _Node, arguments: CalibrateArguments) -> None:
    """Keep what was measured of this rank's node where sessions of its ranks alone look."""
    where = _kept_at(node.machine)
    disk = kept_disk(where) if arguments.disk is None else node.machine.disk
    _make_folder(os.path.dirname(where))
    machine = dataclasses.replace(node.machine, disk=disk)
    write_file("the machine file", where, _file_text(machine, node.facts()).encode())


def _kept_at(machine: Machine) -> str:
    return str(cache_directory() / f"{machine.key}.json")


def _file_text(machine: Machine, facts: dict[str, Any]) -> str:
    content: dict[str, Any] = json.loads(machine.to_json())
    return json.dumps(content | facts, indent=1, sort_keys=True) + "\n"


def _is_whole(path: str) -> bool:
    """Whether a file is a machine that was measured in the whole form."""
    try:
        content = json.loads(read_regular(path, _MOST_BYTES))
        return any("samples" in node for node in content.get("nodes", [content]))
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def _make_folder(path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise DataFileError(
            f"the machine cannot be kept in {path}: {reason(error)}; set XDG_CACHE_HOME, or name a file with --output"
        ) from None
