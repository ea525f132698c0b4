"""Which device each rank takes, and what is said where there is none for it."""

from __future__ import annotations

import pytest

from uncut_mpi.api.start import Sight, _assign

NODE = ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]


def sights(*gpus: list[str]) -> list[Sight]:
    """What the processes of a node see, in the order of their numbers there."""
    return [Sight(seen, "", number) for number, seen in enumerate(gpus)]


def whole_node(num_ranks: int, gpus: list[str] = NODE) -> list[Sight]:
    """Every rank sees every GPU."""
    return sights(*[gpus] * num_ranks)


def test_each_rank_takes_the_only_device_it_sees():
    assert _assign(sights(*[[uuid] for uuid in NODE]), None, False) == ([0, 0, 0, 0], "")


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_process_i_takes_device_i_where_all_are_seen(num_ranks):
    assert _assign(whole_node(num_ranks), None, False) == (list(range(num_ranks)), "")


@pytest.mark.parametrize("part", [[1, 3], [3, 2, 1, 0], [2]])
def test_a_process_has_its_device_whatever_its_rank_in_the_session(part):
    node = whole_node(4)
    assert _assign([node[number] for number in part], None, False) == (part, "")


def test_a_process_beyond_the_devices_is_told_its_number_and_what_to_do():
    ordinals, why = _assign(whole_node(6)[4:], None, False)
    assert not ordinals
    for part in ("rank 0", "process 4 of its node", "GPU 4", "sees 4", "devices"):
        assert part in why
    assert _assign(whole_node(6)[4:], [2, 3], False) == ([2, 3], "")


def test_ranks_may_see_different_numbers_of_devices():
    assert _assign(sights(["GPU-d"], NODE), None, False) == ([0, 1], "")


def test_named_devices_are_taken_in_rank_order():
    assert _assign(whole_node(3), [3, 1, 0], False) == ([3, 1, 0], "")


def test_more_named_devices_than_ranks_are_ignored():
    assert _assign(whole_node(2), [2, 3, 0], False) == ([2, 3], "")


@pytest.mark.parametrize("ordinal", [4, 17, -1])
def test_a_named_device_that_does_not_exist_is_an_obstacle_that_names_rank_number_and_what_was_found(ordinal):
    ordinals, why = _assign(whole_node(2), [0, ordinal], False)
    assert not ordinals
    for part in ("rank 1", f"GPU {ordinal}", "sees 4", "devices"):
        assert part in why


def test_a_named_device_is_counted_among_those_the_rank_sees():
    ordinals, why = _assign(sights(["GPU-a"], ["GPU-b"]), [0, 1], False)
    assert not ordinals
    for part in ("rank 1", "GPU 1", "sees 1"):
        assert part in why


def test_more_ranks_than_devices_never_wrap_round_unasked():
    ordinals, why = _assign(whole_node(3, NODE[:2]), None, False)
    assert not ordinals
    for part in ("rank 2", "sees 2", "start fewer ranks"):
        assert part in why


def test_more_ranks_than_devices_wrap_round_when_sharing_was_asked_for():
    assert _assign(whole_node(5, NODE[:2]), None, True) == ([0, 1, 0, 1, 0], "")


def test_sharing_allowed_does_not_make_ranks_share_while_there_are_devices():
    assert _assign(whole_node(4), None, True) == ([0, 1, 2, 3], "")


@pytest.mark.parametrize(
    ("seen", "devices"),
    [
        (sights(["GPU-a"], ["GPU-b"], ["GPU-a"]), None),
        (whole_node(3), [1, 0, 1]),
        # Masks that show the same device under different numbers.
        (
            sights(["GPU-a", "GPU-b", "GPU-c"], ["GPU-c", "GPU-b", "GPU-d"], ["GPU-b", "GPU-c", "GPU-a"]),
            None,
        ),
    ],
    ids=["masked", "named", "renumbered"],
)
def test_two_ranks_on_one_device_are_told_apart_by_its_uuid_and_need_permission(seen, devices):
    ordinals, why = _assign(seen, devices, False)
    assert not ordinals
    for part in ("ranks 0 and 2", seen[0].gpus[devices[0] if devices else 0], "one rank per GPU", "allow"):
        assert part in why
    allowed, why = _assign(seen, devices, True)
    assert not why
    assert seen[0].gpus[allowed[0]] == seen[2].gpus[allowed[2]]


@pytest.mark.parametrize("allow_shared", [False, True])
@pytest.mark.parametrize("devices", [None, [0, 1, 2]])
def test_a_rank_without_gpu_is_named_with_the_reason(devices, allow_shared):
    seen = [Sight(NODE, "", 0), Sight([], "CUDA_VISIBLE_DEVICES is empty", 1), Sight(NODE, "", 2)]
    ordinals, why = _assign(seen, devices, allow_shared)
    assert not ordinals
    assert why == "rank 1 sees no GPU (CUDA_VISIBLE_DEVICES is empty)"
