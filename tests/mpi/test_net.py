"""The net between nodes: how it is measured, what is kept of that, and a net on which a message does not come."""

from __future__ import annotations

import dataclasses
import json
import time

import pytest

import uncut_mpi as um
from tests.helpers.calibrating import make_small
from tests.helpers.collective import allgather, collective_assert, outcome
from tests.helpers.commands import in_process
from uncut_mpi.api import measure as measuring
from uncut_mpi.api import net_probe
from uncut_mpi.api.net_probe import measure_net
from uncut_mpi.calibrate import main
from uncut_mpi.command import calibrate_job
from uncut_mpi.errors import agreed
from uncut_mpi.model.net import ALONE, BOTH_WAYS, NODES, RANKS, fit_net
from uncut_mpi.spmd.group import Group
from uncut_mpi.spmd.transport import MpiTransport

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.host_backend]


@pytest.fixture(autouse=True)
def small(mpi_tmp_path, monkeypatch):
    """Small probes, and machines measured here stay here."""
    make_small(monkeypatch, mpi_tmp_path)
    monkeypatch.setattr(measuring, "_STEADY_SPREAD", 1.0)


@pytest.fixture
def nodes(comm, per_node):
    group = Group(comm, ranks_per_node=per_node)
    yield group
    group.free()


@pytest.mark.parametrize("whole", [False, True])
def test_every_rank_has_the_same_samples_of_messages_between_nodes(comm, nodes, per_node, whole):
    samples = measure_net(nodes, sizes=(8, 4096, 64 << 10), whole=whole)
    every = allgather(comm, samples)
    collective_assert(comm, every == [every[0]] * comm.size, every)
    kinds = {one.kind for one in samples}
    several = max(
        min(map(nodes.node_of.count, (node, (node + 1) % nodes.num_nodes))) for node in range(nodes.num_nodes)
    )
    wanted = {ALONE, NODES} | ({RANKS} if several > 1 else set())
    # With one rank each, both ways of two nodes are what all nodes do.
    wanted |= {BOTH_WAYS} if whole and max(several, nodes.num_nodes - 1) > 1 else set()
    apart = all(nodes.node_of[source] != nodes.node_of[to] for one in samples for source, to in one.flows)
    senders = {source for one in samples if one.kind == NODES for source, _ in one.flows}
    good = kinds == wanted and apart and {nodes.node_of[rank] for rank in senders} == {*range(nodes.num_nodes)}
    alone = [(one.flows[0], one.nbytes) for one in samples if one.kind == ALONE]
    good &= len(alone) == (3 + 2 * (nodes.num_nodes - 1) if whole else 3) and len({*alone}) == len(alone)
    good &= all(0 < seconds < 60 for one in samples for seconds in one.seconds)
    collective_assert(comm, good, f"{kinds}, {alone}")
    net = fit_net(samples, nodes.node_of)
    collective_assert(comm, 1 <= net.adapters <= max(several, 1) and net.gb_per_s > 0, net)


def test_long_messages_are_left_out_where_the_net_is_slow(comm, nodes, monkeypatch):
    monkeypatch.setattr(net_probe, "_MOST_S", 0.0)
    samples = measure_net(nodes, sizes=(8, 4096, 64 << 10))
    collective_assert(comm, {one.nbytes for one in samples} == {8, 4096}, samples)


def test_a_message_that_does_not_come_is_one_error_on_every_rank(comm, per_node, monkeypatch):
    monkeypatch.setattr(net_probe, "_LIMIT_S", 0.5)
    sent = MpiTransport.send

    def late(self, data, rank):
        if comm.rank == comm.size - 1:
            time.sleep(2.0)
        return sent(self, data, rank)

    group = Group(comm, ranks_per_node=per_node)
    with monkeypatch.context() as patch:
        patch.setattr(MpiTransport, "send", late)
        said = outcome(lambda: measure_net(group))
    every = allgather(comm, said)
    wanted = "StallError" in said and "did not come within 0.5 s" in said and group.hosts[0] in said
    collective_assert(comm, wanted and every == [every[0]] * comm.size, every)


def test_what_fails_on_one_rank_is_raised_by_all(comm, nodes, monkeypatch):
    def refused(*_):
        raise um.CapacityError("no memory, on purpose")

    with monkeypatch.context() as patch:
        if comm.rank == comm.size - 1:
            patch.setattr(net_probe.np, "zeros", refused)
        said = outcome(lambda: measure_net(nodes))
    collective_assert(comm, "CapacityError" in said and "on purpose" in said, said)


def test_a_session_takes_the_machine_that_another_one_has_measured(comm, per_node):
    with um.Session(comm, backend="host", ranks_per_node=per_node) as session:
        machine = session.machine
    keys = allgather(comm, machine.key)
    collective_assert(comm, len({*keys}) == 1 and keys[0].startswith(f"host-{comm.size}-"), keys)
    with um.Session(comm, backend="host", ranks_per_node=per_node, machine=machine) as session:
        collective_assert(comm, session.machine.key == keys[0], session.machine.key)
    with um.Session(comm, backend="host", ranks_per_node=comm.size) as session:
        collective_assert(comm, session.machine.key != keys[0], "one node has the key of several")


@pytest.mark.parametrize("quick", [True, False])
def test_a_calibration_of_several_nodes_is_what_sessions_plan_with(comm, per_node, capfd, mpi_tmp_path, quick):
    if not quick and (comm.size > 4 or per_node != 2):
        pytest.skip("once is enough: nodes of two, and the last one of what is left")
    words = ["--backend", "host", "--ranks-per-node", per_node, *(["--quick"] if quick else ["--time-limit", "1e-3"])]
    status, out, err = in_process(main, comm, capfd)([*words, "--json", mpi_tmp_path / "facts.json"])
    num_nodes = -(-comm.size // per_node)
    said = all(f"## node {node}\n" in out for node in range(num_nodes)) and "net between nodes" in out
    collective_assert(comm, status == 0 and said and "kept in" in out, out + err)
    facts = json.loads((mpi_tmp_path / "facts.json").read_text())
    kinds = {one["kind"] for one in facts["net"]}
    good = {ALONE, NODES} <= kinds and len(facts["nodes"]) == num_nodes
    good &= all(("samples" in node) != quick and ("rehearsal" in node) != quick for node in facts["nodes"])
    collective_assert(comm, good, f"{kinds}, {[[*node] for node in facts['nodes']]}")
    machine = um.load_machine(mpi_tmp_path / "facts.json")
    kept = {path.name for path in (mpi_tmp_path / "cache" / "uncut_mpi" / "machines").iterdir()}
    own = {name for name in kept if name != f"{machine.key}.json"}
    collective_assert(comm, f"{machine.key}.json" in kept and own, kept)
    if not machine.steady:
        return  # a busy machine is measured again
    with um.Session(comm, backend="host", ranks_per_node=per_node) as session:
        same = session.machine.latency_s.tolist() == machine.latency_s.tolist()
        collective_assert(comm, same and session.machine.num_nodes == num_nodes, "another machine was taken")


def test_a_quick_form_says_that_it_takes_the_place_of_a_whole_one_of_several_nodes(comm, capfd, mpi_tmp_path):
    path = mpi_tmp_path / "machine.json"
    words = ["--backend", "host", "--ranks-per-node", 1, "--quick", "--output", path]
    run, said = in_process(main, comm, capfd), "it takes the place of a whole calibration"
    _, first, _ = run(words)
    _, again, _ = run(words)
    if comm.rank == 0:
        content = json.loads(path.read_text())
        content["nodes"][-1]["samples"] = {}
        path.write_text(json.dumps(content))
    _, third, _ = run(words)
    good = [said in one for one in (first, again, third)] == [False, False, comm.rank == 0 or said in third]
    collective_assert(comm, good, first + again + third)
    collective_assert(comm, not (mpi_tmp_path / "cache").exists(), "a file was kept besides")


def test_a_net_that_is_busy_is_told_and_measured_again(comm, capfd, mpi_tmp_path, monkeypatch):
    whole = calibrate_job._measure_node

    def quick(group, arguments, progress):
        return whole(group, dataclasses.replace(arguments, quick=True), progress)

    monkeypatch.setattr(calibrate_job, "_measure_node", quick)
    told = []
    for busy in (False, True):
        monkeypatch.setattr(calibrate_job, "are_steady", lambda summaries, busy=busy: bool(summaries) and not busy)
        words = [
            "--backend",
            "host",
            "--ranks-per-node",
            1,
            "--time-limit",
            "1e-3",
            "--output",
            mpi_tmp_path / "m.json",
        ]
        status, _, err = in_process(main, comm, capfd)(words)
        collective_assert(comm, status == 0, err)
        machine = um.load_machine(mpi_tmp_path / "m.json")
        told.append((machine.steady, "the net was busy" in machine.provenance))
    collective_assert(comm, told == [(True, False), (False, True)], told)


@pytest.mark.parametrize("given", ["few", "0"])
def test_no_number_of_ranks_in_the_environment_is_one_error(comm, capfd, monkeypatch, given):
    monkeypatch.setenv("UNCUT_MPI_RANKS_PER_NODE", given)
    status, out, err = in_process(main, comm, capfd)(["--backend", "host", "--quick"])
    collective_assert(comm, status == 2 and not out, out + err)
    collective_assert(comm, comm.rank > 0 or given in err, err)


def test_a_node_that_cannot_be_measured_is_told_on_all_nodes(comm, per_node, monkeypatch):
    def refused(*_):
        raise agreed(um.DeviceError("not measured, on purpose"))

    last = (comm.size - 1) // per_node
    with monkeypatch.context() as patch:
        if comm.rank // per_node == last:
            patch.setattr(measuring, "measure", refused)
        said = outcome(lambda: um.Session(comm, backend="host", ranks_per_node=per_node))
    collective_assert(comm, "DeviceError" in said and "on purpose" in said, said)
