"""Inputs that went bad are errors of ours, each: never a crash, nor an error that Python has for its own mistakes."""

from __future__ import annotations

from tests.helpers.bad_inputs import read_all


def test_inputs_that_went_bad_are_errors_of_ours() -> None:
    for kind, found in read_all(60).items():
        assert found.total() == 60
        assert len(found) > 1, kind  # not all are still valid
        assert not found["no message"], kind
