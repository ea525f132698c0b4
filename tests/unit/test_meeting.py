"""Ranks that meet and then leave: who met with them is not told that they left that meeting."""

from __future__ import annotations

import threading

import numpy as np

from uncut_mpi import _native

RECORD_BYTES, ROUNDS = 64, 150
MET = (1, 2)


def test_a_meeting_that_everybody_came_to_is_complete_although_some_left_at_once():
    outcomes = []
    for _ in range(ROUNDS):
        room = np.zeros(_native.Meeting.room_bytes(3), np.uint8)
        meetings = [_native.Meeting(room, rank, 3, RECORD_BYTES) for rank in range(3)]
        start = threading.Barrier(3)

        def take_part(rank, meetings=meetings, start=start):
            everyone = np.zeros(3 * RECORD_BYTES, np.uint8)
            start.wait()
            outcome = meetings[rank].meet(np.zeros(RECORD_BYTES, np.uint8), everyone, 0.0)
            while outcome == 0:
                outcome = meetings[rank].collect(everyone, 1e-6)
            outcomes.append(outcome)
            meetings[rank].leave("ValueError")

        threads = [threading.Thread(target=take_part, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert len(outcomes) == 3 * ROUNDS
    assert all(outcome in MET for outcome in outcomes), [*map(outcomes.count, range(4))]
