"""Shared memory: what peers see of it, what too little of it says, and that nothing of it is left."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import mmap
import os
import pathlib
import signal
import stat
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from uncut_mpi import segments
from uncut_mpi.errors import CapacityError, DeviceError, ParamError, TopologyError
from uncut_mpi.segments import ALIGNMENT, Segment

PAGE = os.sysconf("SC_PAGE_SIZE")
both_kinds = pytest.mark.parametrize("use_file", [False, True], ids=["anonymous", "file"])


@pytest.fixture(params=[False, True], ids=["anonymous", "file"])
def segment(request):
    """Return memory of a page and a byte of both kinds."""
    made = Segment.create(PAGE + 1, "a test", use_file=request.param)
    yield made
    made.close()


def names(process=None):
    """Return the files of a process in /dev/shm, by default of this one."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(f"uncut_mpi-{process or os.getpid()}-")}


def descriptors():
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if "uncut_mpi" in target and ("memfd" in target or "/dev/shm" in target):
            found.append(target)
    return found


def mappings():
    return [
        line for line in pathlib.Path("/proc/self/maps").read_text().splitlines() if "uncut_mpi" in line.split()[-1]
    ]


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    gc.collect()
    assert not names()
    assert not descriptors()
    assert not [line for line in mappings() if "memfd:" in line or "/dev/shm" in line]


def in_peer(handle, code):
    """Run code in another process, with `s` the opened segment; return what it prints."""
    program = f"from uncut_mpi.segments import Segment\nimport numpy as np\nh = bytes.fromhex('{handle.hex()}')\n{code}"
    return subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, timeout=60)


def test_a_peer_reads_and_writes_the_same_memory(segment):
    array = segment.array(np.float64, (5, 5))
    data = np.random.default_rng(0).uniform(size=(5, 5))
    array[:] = data
    done = in_peer(
        segment.handle,
        "s = Segment.open(h); a = s.array(float, (5, 5)); print(repr(a.sum()), s.nbytes); a *= 2; s.close()",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{data.sum()!r} {PAGE + 1}\n"
    assert (array == 2 * data).all()


def test_new_memory_is_zero_and_page_aligned(segment):
    assert segment.address % PAGE == 0
    assert segment.nbytes == PAGE + 1
    assert not segment.array().any()
    assert segment.array().__array_interface__["data"] == (segment.address, False)


@both_kinds
def test_memory_begins_at_the_same_place_of_a_line_in_every_process(use_file):
    kept = [Segment.create(nbytes, "a test", use_file=use_file) for nbytes in (1, 3 * PAGE, ALIGNMENT, ALIGNMENT + 7)]
    assert not any(segment.address % ALIGNMENT for segment in kept)
    handles = [segment.handle for segment in kept]
    done = in_peer(
        b"", f"for h in {handles}:\n    s = Segment.open(h)\n    print(s.address % (2 << 20), s.array().sum())"
    )
    assert done.stdout == 4 * "0 0\n", done.stderr
    for segment in kept:
        segment.close()


def test_without_room_to_choose_a_place_memory_begins_at_a_page(monkeypatch):
    mapped = mmap.mmap

    def refuse(descriptor, *others):
        if descriptor == -1:
            raise OSError(errno.ENOMEM, "no room")
        return mapped(descriptor, *others)

    monkeypatch.setattr(segments.mmap, "mmap", refuse)
    segment = Segment.create(2 * PAGE, "a test")
    segment.array()[:] = 3
    done = in_peer(segment.handle, "s = Segment.open(h); print(s.array().sum())")
    assert done.stdout == f"{2 * PAGE * 3}\n"
    assert segment.address % PAGE == 0
    segment.close()


def test_all_of_the_address_space_is_given_back():
    def mapped_kib():
        return int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * PAGE >> 10

    before = mapped_kib()
    for _ in range(20):
        Segment.create(ALIGNMENT, "a test").close()
    assert mapped_kib() < before + 10 * ALIGNMENT // 1024


@both_kinds
def test_no_bytes_are_a_segment_too(use_file):
    segment = Segment.create(0, "a test", use_file=use_file)
    assert segment.array(np.float64).shape == (0,)
    peer = Segment.open(segment.handle)
    assert (peer.nbytes, peer.array().size) == (0, 0)
    peer.close()
    segment.close()


def test_arrays_of_any_type_shape_and_offset_lie_inside():
    segment = Segment.create(64, "a test")
    segment.array(np.uint8)[:] = np.arange(64, dtype=np.uint8)
    assert segment.array(np.uint64, 2, offset_bytes=48).tobytes() == bytes(range(48, 64))
    assert segment.array(ml_dtypes.bfloat16, (4, 8)).nbytes == 64
    assert segment.array(np.float64, offset_bytes=60).size == 0
    for arguments in ((np.uint8, 65), (np.float64, 8, 1), (np.uint8, 1, -1), (np.uint8, 0, 65)):
        with pytest.raises(ParamError, match="64 bytes"):
            segment.array(*arguments)
    segment.close()


def test_a_size_below_zero_is_refused():
    with pytest.raises(ParamError, match="-1 bytes"):
        Segment.create(-1, "a test")


def test_arrays_outlive_close_and_the_pages_go_with_the_last_of_them(segment):
    array = segment.array(np.float64)
    part = array[10:20]
    segment.close()
    segment.close()
    array[:] = 7.0
    del array
    assert (part == 7.0).all()
    assert segment._mapping is None
    with pytest.raises(ParamError, match="closed"):
        segment.array()
    del part


def test_withdrawn_memory_cannot_be_opened_but_stays_mapped(segment):
    peer = Segment.open(segment.handle)
    segment.unlink()
    assert not names()
    segment.array()[5] = 9
    assert peer.array()[5] == 9
    with pytest.raises(TopologyError, match="withdrawn"):
        Segment.open(segment.handle)
    segment.close()
    assert peer.array()[5] == 9
    peer.close()


def test_a_file_is_for_its_user_only():
    segment = Segment.create(10, "a test", use_file=True)
    (name,) = names()
    assert stat.S_IMODE(os.stat(f"/dev/shm/{name}").st_mode) == 0o600
    segment.close()


@pytest.mark.parametrize("end", ["pass", "raise SystemExit(3)", "raise ValueError", "del s; gc.collect()"])
def test_a_creator_that_never_closes_leaves_no_file(end):
    code = f"import gc\nfrom uncut_mpi.segments import Segment\ns = Segment.create(10, 'x', use_file=True)\n{end}"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as process:
        assert process.wait(60) == {"raise SystemExit(3)": 3, "raise ValueError": 1}.get(end, 0)
    assert not names(process.pid)


def test_a_killed_creator_leaves_no_anonymous_memory():
    code = (
        "from uncut_mpi.segments import Segment\n"
        "s = Segment.create(10, 'x')\nprint(s.handle.hex(), flush=True)\ninput()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        handle = bytes.fromhex(process.stdout.readline().strip())
        Segment.open(handle).close()
        process.send_signal(signal.SIGKILL)
        process.wait(20)
    with pytest.raises(TopologyError, match=f"process {process.pid}"):
        Segment.open(handle)


def test_a_forked_child_does_not_withdraw_the_memory():
    segment = Segment.create(10, "a test", use_file=True)
    child = os.fork()
    if child == 0:
        segment.unlink()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    Segment.open(segment.handle).close()
    segment.close()


@both_kinds
def test_more_than_the_node_has_is_a_capacity_error(use_file):
    with pytest.raises(CapacityError, match=r"a huge matrix needs 1126 TB .* available .*: use smaller"):
        Segment.create(1 << 50, "a huge matrix", use_file=use_file)


def test_a_small_dev_shm_limits_files_only(monkeypatch):
    real = os.statvfs

    def small(path):
        # 64 MiB, as containers have by default.
        return os.statvfs_result([4096, 4096, 16384, 16384, 16384, *tuple(real(path))[5:]])

    monkeypatch.setattr(os, "statvfs", small)
    with pytest.raises(CapacityError, match=r"needs 68.16 MB .* /dev/shm has 67.11 MB left: .*--shm-size"):
        Segment.create(65 << 20, "a test", use_file=True)
    Segment.create(65 << 20, "a test").close()


@pytest.mark.parametrize(
    ("module", "call", "use_file", "number", "kind", "words"),
    [
        *((os, "posix_fallocate", use_file, number, CapacityError, r"a test needs 8\.192 kB")
          for use_file in (False, True) for number in (errno.ENOSPC, errno.ENOMEM)),
        (os, "posix_fallocate", False, errno.EIO, DeviceError, r"a test: reserving 8\.192 kB failed \(Input/output"),
        (os, "posix_fallocate", False, errno.EFBIG, CapacityError, r"a test.*raise the limit.*\(ulimit -f\)"),
        (os, "memfd_create", False, errno.EMFILE, CapacityError, r"a test.*raise the limit.*\(ulimit -n\)"),
        (os, "open", True, errno.EMFILE, CapacityError, r"a test.*raise the limit.*\(ulimit -n\)"),
        (mmap, "mmap", False, errno.ENOMEM, CapacityError, r"a test.*raise the limit.*\(ulimit -v\)"),
    ],
)  # fmt: skip
def test_what_the_system_refuses_is_said_with_a_limit_of_the_process(
    monkeypatch, module, call, use_file, number, kind, words
):
    def refuse(*unused):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(module, call, refuse)
    with pytest.raises(kind, match=words):
        Segment.create(8192, "a test", use_file=use_file)


def test_a_system_without_anonymous_memory_gets_a_file(monkeypatch):
    def refuse(*unused):
        raise OSError(errno.EPERM, "seccomp")

    monkeypatch.setattr(os, "memfd_create", refuse)
    segment = Segment.create(10, "a test")
    assert len(names()) == 1
    Segment.open(segment.handle).close()
    segment.close()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"node": "another"}, "another node"),
        ({"inode": 1}, "no longer the shared memory"),
    ],
)
def test_memory_of_elsewhere_or_in_the_place_of_what_was_there_is_not_mapped(segment, fields, words):
    handle = json.dumps(segments._unpack(segment.handle)._replace(**fields)).encode()
    with pytest.raises(TopologyError, match=words):
        Segment.open(handle).close()


@pytest.mark.parametrize("handle", [b"", b"x" * 64, bytes(200)])
def test_other_bytes_are_no_handle(handle):
    with pytest.raises(ParamError, match="no handle"):
        Segment.open(handle)


def test_processes_that_reserve_at_once_do_not_take_the_same_memory_twice(monkeypatch):
    # The one who comes second must look at what is left only after the first has taken its part.
    code = """
import os, time
from uncut_mpi import segments
real = os.posix_fallocate
def slow(*arguments):
    print("reserving", flush=True); time.sleep(0.3); real(*arguments); print("reserved", flush=True)
os.posix_fallocate = slow
segments.Segment.create(4096, "x")
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "reserving\n"
        states = []
        real = segments.available_bytes

        def look():
            os.set_blocking(first.stdout.fileno(), False)
            states.append(first.stdout.read())
            return real()

        monkeypatch.setattr(segments, "available_bytes", look)
        Segment.create(4096, "y").close()
    assert states == ["reserved\n"]


def test_the_node_identity_is_the_same_in_another_process():
    done = subprocess.run(
        [sys.executable, "-c", "from uncut_mpi.segments import node_identity; print(node_identity())"],
        text=True,
        capture_output=True,
        timeout=60,
    )
    assert done.stdout.strip() == segments.node_identity()


# -- interrupts ------------------------------------------------------------------------------------


def interrupted_everywhere(call):
    """Call it again and again, each time interrupted before another line; yield each interrupt."""
    place, error = 0, KeyboardInterrupt()
    while error is not None:
        place, error, lines = place + 1, None, iter(range(10**6))

        def trace(frame, event, argument, place=place, lines=lines):
            if frame.f_code.co_filename != segments.__file__:
                return None
            if event == "line" and next(lines) == place:
                raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            segment = call()
        except KeyboardInterrupt as caught:
            error = caught
        finally:
            sys.settrace(None)
        if error is not None:
            yield error
    segment.close()


def test_an_interrupt_between_opening_and_keeping_leaks_nothing():
    def profile(frame, event, argument):
        if event == "c_return" and argument in (os.open, os.memfd_create):
            raise KeyboardInterrupt

    before = len(os.listdir("/proc/self/fd"))
    for use_file in (False, True):
        sys.setprofile(profile)
        try:
            Segment.create(1000, "a test", use_file=use_file).close()
        except KeyboardInterrupt as error:
            error.__traceback__ = None
        finally:
            sys.setprofile(None)
    assert len(os.listdir("/proc/self/fd")) == before
    assert not names()


def files_of_shared_memory():
    links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    return [os.readlink(link) for link in links if os.path.islink(link) and "/dev/shm" in os.readlink(link)]


@both_kinds
def test_an_interrupt_anywhere_leaves_nothing_and_holds_up_no_other_process(use_file):
    places, before = 0, files_of_shared_memory()  # an MPI may have some of its own
    for error in interrupted_everywhere(lambda: Segment.create(1000, "a test", use_file=use_file)):
        # While the error is still on its way, since it may be carried to other ranks first.
        assert not names(), error
        assert not descriptors(), error
        assert files_of_shared_memory() == before, error  # a lock
        places += 1
    assert places > 30
    with contextlib.closing(Segment.create(1000, "a test", use_file=use_file)) as segment:
        held = len(descriptors())
        for error in interrupted_everywhere(lambda: Segment.open(segment.handle)):
            error.__traceback__ = None
            assert len(descriptors()) == held
