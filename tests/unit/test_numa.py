"""Memory over NUMA nodes: which nodes there are, that one is left alone, and that a policy is put back."""

from __future__ import annotations

import pytest

from uncut_mpi import numa
from uncut_mpi.segments import Segment


@pytest.fixture
def found_by(tmp_path, monkeypatch):
    monkeypatch.setattr(numa, "_NODES", str(tmp_path / "nodes"))
    monkeypatch.setattr(numa, "_STATUS", str(tmp_path / "status"))

    def found(nodes, allowed):
        (tmp_path / "nodes").write_text(nodes)
        (tmp_path / "status").write_text(f"Name:\tx\nMems_allowed:\t0f\nMems_allowed_list:\t{allowed}\n")
        return numa.memory_nodes()

    return found


@pytest.mark.parametrize(
    ("nodes", "allowed", "found"),
    [("0\n", "0", [0]), ("0-3\n", "0-7", [0, 1, 2, 3]), ("0-1,4\n", "1-4", [1, 4]), ("0-1\n", "0", [0])],
)
def test_nodes_with_memory_that_the_process_may_use_are_found(found_by, nodes, allowed, found):
    assert found_by(nodes, allowed) == found


def test_a_system_that_does_not_say_has_no_nodes(found_by):
    assert numa.memory_nodes() == []
    assert found_by("a-b\n", "0") == []


class Calls:
    """Takes the place of the system calls and keeps the policy."""

    def __init__(self, policy=0, refused=False):
        self.policy, self.refused, self.nodes = policy, refused, []
        self.seen = []

    def __call__(self, number, *arguments):
        if number == numa._GET_MEMPOLICY:
            arguments[0]._obj.value = self.policy
            return 0
        if self.refused:
            return -1
        self.policy = arguments[0].value
        # The kernel takes one bit less than it is told, and may read no further than the mask goes.
        assert arguments[1] is None or arguments[2].value == 64 * len(arguments[1]) + 1
        words = list(arguments[1]) if arguments[1] is not None else []
        self.nodes = [64 * at + bit for at, word in enumerate(words) for bit in range(64) if word >> bit & 1]
        self.seen.append((self.policy, self.nodes))
        return 0


@pytest.fixture
def calls(monkeypatch):
    def install(nodes=(0, 1), **options):
        made = Calls(**options)
        monkeypatch.setattr(numa, "_syscall", made)
        monkeypatch.setattr(numa, "memory_nodes", lambda: list(nodes))
        return made

    return install


def test_pages_are_spread_within_the_block_and_the_policy_is_put_back(calls):
    made = calls([0, 1, 70])
    with numa.interleaved() as spread:
        assert spread
        assert (made.policy, made.nodes) == (3, [0, 1, 70])
    assert (made.policy, made.nodes) == (0, [])


def test_the_policy_is_put_back_after_an_error(calls):
    made = calls()
    with pytest.raises(MemoryError), numa.interleaved():
        raise MemoryError
    assert made.policy == 0


@pytest.mark.parametrize("nodes", [[], [0], [0, 5000]])
def test_one_node_or_too_many_are_left_alone(calls, nodes):
    made = calls(nodes)
    with numa.interleaved() as spread:
        assert not spread
    assert not made.seen


def test_a_policy_of_the_user_stands(calls):
    made = calls(policy=2)
    with numa.interleaved() as spread:
        assert not spread
    assert (made.policy, made.seen) == (2, [])


def test_a_system_that_refuses_is_no_error(calls):
    calls(refused=True)
    with numa.interleaved() as spread:
        assert not spread


def test_memory_is_reserved_under_the_policy_only_where_it_is_asked_for(calls, monkeypatch):
    made = calls()
    policies = []
    from uncut_mpi import segments

    true_reserve = segments._reserve

    def reserve(*arguments):
        policies.append(made.policy)
        true_reserve(*arguments)

    monkeypatch.setattr(segments, "_reserve", reserve)
    Segment.create(4096, "a test", interleave=True).close()
    Segment.create(4096, "a test").close()
    assert policies == [3, 0]
    assert made.policy == 0


def test_the_real_calls_are_understood_by_the_system():
    if numa._policy() != 0:
        pytest.skip("this process has a memory policy of its own, or the system does not tell")
    nodes = numa.memory_nodes()
    assert nodes
    if not numa._set_policy(numa._INTERLEAVE, nodes):
        pytest.skip("the system refuses memory policies")
    assert numa._policy() == numa._INTERLEAVE
    assert numa._set_policy(numa._DEFAULT, [])
    assert numa._policy() == 0
