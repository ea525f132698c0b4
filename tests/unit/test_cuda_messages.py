"""How what is sent from device memory gets to a buffer: by streams of its own, whose events are used again."""

from __future__ import annotations

import types

from uncut_mpi.device.cuda.backend import CudaBackend


class Event:
    done = False

    def record(self, stream: object) -> None:
        self.done, self.stream = False, stream


def backend_of(copies: list[tuple[int, ...]]) -> CudaBackend:
    """Return a backend of a device that copies nothing and notes what it is asked to copy."""
    made: CudaBackend = object.__new__(CudaBackend)
    made._runtime = types.SimpleNamespace(memcpy2DAsync=lambda *about: copies.append(about))
    made._cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(Event=lambda disable_timing: Event()))
    made._net_streams = [types.SimpleNamespace(ptr=17), types.SimpleNamespace(ptr=18)]
    made._net_events = []
    return made


def test_copies_each_way_have_a_stream_and_a_column_alone_has_no_pitch() -> None:
    copies: list[tuple[int, ...]] = []
    backend = backend_of(copies)
    backend._begin_copy(False, 1000, 64, 2000, 256, 64, 5)
    backend._begin_copy(True, 2000, 8, 1000, 64, 64, 1)
    assert [(*about[:6], about[7]) for about in copies] == [
        (1000, 64, 2000, 256, 64, 5, 17),
        (2000, 64, 1000, 64, 64, 1, 18),
    ]


def test_an_event_serves_again_when_its_copy_is_over_and_is_asked_no_more() -> None:
    backend = backend_of([])
    first = backend._begin_copy(False, 1, 8, 2, 8, 8, 1)
    assert not first()
    assert not backend._net_events
    taken = first.__closure__
    assert taken is not None
    event = next(cell.cell_contents for cell in taken if isinstance(cell.cell_contents, Event))
    event.done = True
    assert first()
    assert backend._net_events == [event]
    second = backend._begin_copy(True, 1, 8, 2, 8, 8, 1)
    assert first()
    assert not second()
    assert not backend._net_events
