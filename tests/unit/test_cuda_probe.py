"""What is timed on a GPU, with a clock and events of the test's own."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

from uncut_mpi.device.cuda import probe as probing
from uncut_mpi.device.cuda.probe import CudaProbe


class Clock:
    """A device whose work takes given times, in milliseconds."""

    def __init__(self, *times_ms):
        self.times_ms = list(times_ms)
        self.now_ms = 0.0
        self.freed = 0

    def launch(self):
        if not self.times_ms:
            raise RuntimeError("no more work")
        self.now_ms += self.times_ms.pop(0)

    def free(self):
        self.freed += 1

    def cupy(self):
        def record(event, stream):
            assert stream == 77
            event["ms"] = self.now_ms

        class Event:
            def __init__(self):
                self.ptr = {}

            def synchronize(self):
                assert "ms" in self.ptr

        def elapsed(start, stop):
            return stop.ptr["ms"] - start.ptr["ms"]

        runtime = SimpleNamespace(eventRecord=record)
        return SimpleNamespace(cuda=SimpleNamespace(runtime=runtime, Event=Event, get_elapsed_time=elapsed))


def make(monkeypatch, clock, times):
    monkeypatch.setattr(probing, "import_cupy", clock.cupy)
    return CudaProbe(lambda what: contextlib.nullcontext(), 77, clock.launch, times, clock.free)


def test_work_is_repeated_for_as_long_as_asked_after_a_turn_that_is_not_timed(monkeypatch):
    clock = Clock(1000.0, 4.0, 8.0, 6.0)
    probe = make(monkeypatch, clock, 4)
    assert probe.mean_seconds(0.01) == pytest.approx(12e-3 / 8)
    assert probe.mean_seconds(0.0) == pytest.approx(6e-3 / 4)
    probe.close()
    assert clock.freed == 1


def test_work_that_fails_at_once_is_freed(monkeypatch):
    clock = Clock()
    with pytest.raises(RuntimeError, match="no more work"):
        make(monkeypatch, clock, 1)
    assert clock.freed == 1
