"""Host memory is registered once for all who use it, as a whole or not at all. No GPU: a stand-in for CUDA."""

from __future__ import annotations

import random

import pytest

from uncut_mpi.device.cuda.pinning import PinnedMemory
from uncut_mpi.device.interface import Pin
from uncut_mpi.errors import PinError

INVALID, ALREADY = 1, 712


class Cuda:
    """Registers exact bytes, as CUDA does; no two ranges may overlap, and files may only be read."""

    def __init__(self, files=()):
        self.ranges: dict[int, tuple[int, int]] = {}
        self.files = files
        self.foreign: list[tuple[int, int]] = []

    def register(self, address, nbytes, flags):
        stop = address + nbytes
        if any(start < stop and address < end for start, end in self.files) and not flags & 8:
            return INVALID
        if any(start < stop and address < start + n for start, (n, _) in self.ranges.items()):
            return ALREADY
        if any(start < stop and address < end for start, end in self.foreign):
            return ALREADY
        self.ranges[address] = nbytes, flags
        return 0

    def unregister(self, address):
        del self.ranges[address]

    def is_known(self, address):
        known = [*((start, start + n) for start, (n, _) in self.ranges.items()), *self.foreign]
        return any(start <= address < end for start, end in known)


@pytest.fixture
def cuda():
    return Cuda()


@pytest.fixture
def memory(cuda):
    return PinnedMemory(cuda.register, cuda.unregister, cuda.is_known)


def test_a_part_of_what_is_registered_keeps_it_when_the_whole_is_given_back(cuda, memory):
    assert memory.pin("one", 1000, 500) is Pin.WRITEABLE
    assert memory.pin("one", 1100, 50) is Pin.WRITEABLE
    assert [*cuda.ranges] == [1000]
    memory.unpin("one", 1000)
    assert cuda.is_known(1100)
    memory.unpin("one", 1100)
    assert not cuda.ranges


def test_the_whole_of_which_a_part_is_registered_is_registered_with_it(cuda, memory):
    memory.pin("one", 1100, 50)
    memory.pin("one", 1140, 100)
    assert memory.pin("one", 1000, 500) is Pin.WRITEABLE
    assert cuda.ranges == {1000: (500, 3)}
    for address in (1100, 1000, 1140):
        assert cuda.is_known(1499)
        memory.unpin("one", address)
    assert not cuda.ranges


def test_what_another_session_uses_is_counted_and_not_taken_apart(cuda, memory):
    memory.pin("one", 1000, 500)
    assert memory.pin("two", 1200, 100) is Pin.WRITEABLE
    memory.unpin_all("one")
    assert cuda.is_known(1200)
    with pytest.raises(PinError, match="another session uses"):
        memory.pin("one", 1200, 1000)
    memory.unpin("two", 1200)
    assert not cuda.ranges


def test_what_the_program_has_registered_is_used_as_it_is(cuda, memory):
    cuda.foreign.append((1000, 2000))
    assert memory.pin("one", 1000, 1000) is Pin.FOREIGN
    assert not Pin.FOREIGN
    memory.unpin("one", 1000)
    with pytest.raises(PinError, match="the program or another matrix uses a part"):
        memory.pin("one", 1500, 1000)
    with pytest.raises(PinError, match="the program or another matrix uses a part"):
        memory.pin("one", 500, 3000)


def test_the_pages_of_a_file_are_readable_alone(memory, cuda):
    cuda.files = ((1000, 2000),)
    assert memory.pin("one", 1000, 500) is Pin.READABLE
    assert memory.pin("one", 1400, 200) is Pin.READABLE
    assert cuda.ranges == {1000: (600, 11)}
    memory.unpin_all("one")
    assert not cuda.ranges


def test_memory_that_cannot_be_registered_is_an_error_and_what_was_is_registered_again(cuda, memory):
    memory.pin("one", 1100, 50)
    cuda.foreign.append((1300, 1400))
    with pytest.raises(PinError, match="register the whole first, or pass a copy"):
        memory.pin("one", 1000, 500)
    assert cuda.ranges == {1100: (50, 3)}
    refusing = PinnedMemory(lambda *given: 2, cuda.unregister, cuda.is_known)
    with pytest.raises(PinError, match=r"error 2\): use less host memory"):
        refusing.pin("one", 9000, 5)


@pytest.mark.parametrize("seed", range(20))
def test_random_uses_are_registered_while_they_last_and_not_after(cuda, memory, seed):
    rng = random.Random(seed)
    uses = []
    for _ in range(200):
        if uses and rng.random() < 0.45:
            owner, address, _ = uses.pop(rng.randrange(len(uses)))
            memory.unpin(owner, address)
        else:
            owner, address, nbytes = rng.choice("ab"), rng.randrange(1000), rng.randrange(1, 60)
            try:
                memory.pin(owner, address, nbytes)
            except PinError:
                continue
            uses.append((owner, address, nbytes))
        for _, address, nbytes in uses:
            assert any(start <= address and address + nbytes <= start + n for start, (n, _) in cuda.ranges.items())
    for owner, address, _ in uses:
        memory.unpin(owner, address)
    assert not cuda.ranges
