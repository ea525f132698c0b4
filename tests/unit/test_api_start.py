"""Which device each rank takes, and what is said where there is none for it."""

from __future__ import annotations

import pytest

from uncut_mpi.api.start import _assign

NODE = ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]


def whole_node(num_ranks: int, gpus: list[str] = NODE) -> list[tuple[list[str], str]]:
    """Every rank sees every GPU."""
    return [(gpus, "")] * num_ranks


def test_each_rank_takes_the_only_device_it_sees():
    assert _assign([([uuid], "") for uuid in NODE], None, False) == ([0, 0, 0, 0], "")


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_rank_i_takes_device_i_where_all_are_seen(num_ranks):
    assert _assign(whole_node(num_ranks), None, False) == (list(range(num_ranks)), "")


def test_ranks_may_see_different_numbers_of_devices():
    assert _assign([(["GPU-d"], ""), (NODE, "")], None, False) == ([0, 1], "")


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
    ordinals, why = _assign([(["GPU-a"], ""), (["GPU-b"], "")], [0, 1], False)
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
        ([(["GPU-a"], ""), (["GPU-b"], ""), (["GPU-a"], "")], None),
        (whole_node(3), [1, 0, 1]),
        # Masks that show the same device under different numbers.
        (
            [(["GPU-a", "GPU-b", "GPU-c"], ""), (["GPU-c", "GPU-b", "GPU-d"], ""), (["GPU-b", "GPU-c", "GPU-a"], "")],
            None,
        ),
    ],
    ids=["masked", "named", "renumbered"],
)
def test_two_ranks_on_one_device_are_told_apart_by_its_uuid_and_need_permission(seen, devices):
    ordinals, why = _assign(seen, devices, False)
    assert not ordinals
    for part in ("ranks 0 and 2", seen[0][0][devices[0] if devices else 0], "one rank per GPU", "allow"):
        assert part in why
    allowed, why = _assign(seen, devices, True)
    assert not why
    assert seen[0][0][allowed[0]] == seen[2][0][allowed[2]]


@pytest.mark.parametrize("allow_shared", [False, True])
@pytest.mark.parametrize("devices", [None, [0, 1, 2]])
def test_a_rank_without_gpu_is_named_with_the_reason(devices, allow_shared):
    seen = [(NODE, ""), ([], "CUDA_VISIBLE_DEVICES is empty"), (NODE, "")]
    ordinals, why = _assign(seen, devices, allow_shared)
    assert not ordinals
    assert why == "rank 1 sees no GPU (CUDA_VISIBLE_DEVICES is empty)"
