"""The gemm command on several ranks: its report, its files, its errors and its exit status."""

from __future__ import annotations

import contextlib
import json
import os

import ml_dtypes
import numpy as np
import pytest

import uncut_mpi.api.start as start
import uncut_mpi.command.job as command_job
import uncut_mpi.command.product as command_product
from tests.helpers.collective import allgather, collective_assert
from tests.helpers.commands import in_process
from tests.helpers.faulty import FaultyBackend
from tests.helpers.timelines import check_trace
from uncut_mpi import env
from uncut_mpi.device.host.executor import HostExecutable
from uncut_mpi.gemm import main
from uncut_mpi.planning.lower import Code
from uncut_mpi.planning.options import SEARCHED
from uncut_mpi.spmd.abort import finish

KEYS = (
    "m n k dtype trans_a trans_b alpha beta place backend ranks nodes scheduler grid tile tasks plan_s first_call_s "
    "median_s min_s max_s tflop_per_s bound_s predicted_s bytes error tolerance passed device version"
)
SMALL = ["-m", "96", "-n", "80", "-k", "70", "--options", '{"tile": 32}', "--warmup", "0", "--repeat", "2"]
# A search leaves out ranks that were measured to be slow, as the one with the fault may be; the paper's heuristics do
# not.
ON_ALL_RANKS = ["--scheduler", "uncut"]


@pytest.fixture(autouse=True)
def own_cache(machine_cache, monkeypatch):
    """Machines measured here stay here."""
    monkeypatch.setenv("XDG_CACHE_HOME", machine_cache)


@pytest.fixture
def folder(mpi_tmp_path, comm):
    """Random matrix files, written by rank 0."""
    if comm.rank == 0:
        rng = np.random.default_rng(5)
        a, b, c = (rng.uniform(-1, 1, shape) for shape in ((60, 40), (40, 50), (60, 50)))
        np.save(mpi_tmp_path / "A.npy", a)
        np.save(mpi_tmp_path / "B.npy", np.asfortranarray(b))
        np.save(mpi_tmp_path / "C.npy", c)
        np.save(mpi_tmp_path / "A32.npy", a.astype(np.float32))
        np.save(mpi_tmp_path / "Abf16.npy", a.astype(ml_dtypes.bfloat16))
        np.save(mpi_tmp_path / "Bbf16.npy", b.astype(ml_dtypes.bfloat16))
        np.save(mpi_tmp_path / "cube.npy", np.zeros((2, 2, 2)))
        np.save(mpi_tmp_path / "whole.npy", np.zeros((4, 4), np.int64))
        raw = (mpi_tmp_path / "A.npy").read_bytes()
        (mpi_tmp_path / "short.npy").write_bytes(raw[:-100])
        (mpi_tmp_path / "text.npy").write_text("not a matrix")
        (mpi_tmp_path / "there.npy").write_text("keep me")
    comm.Barrier()
    return mpi_tmp_path


@pytest.fixture
def job(comm, capfd, backend_name):
    """Runs the command in this process; returns (status, everything rank 0 printed, its errors)."""

    return in_process(main, comm, capfd, ["--backend", backend_name])


def test_the_report_has_every_line_and_the_json_every_key(comm, job, mpi_tmp_path):
    path = mpi_tmp_path / "facts.json"
    last = comm.size - 1
    status, out, err = job([*SMALL, "--place", f"{last},h,0", "--trans-b", "T", "--json", path])
    wanted = ("problem", "plan", "in short", "first call", "calls", "rate", "predicted", "bound", "check", "PASS")
    facts = json.loads(path.read_text())
    keys = KEYS.split()
    good = (
        status == 0
        and not err
        and all(any(line.startswith(word) for line in out.splitlines()) for word in wanted)
        and set(keys) <= set(facts)
        and facts["passed"] is True
        and facts["ranks"] == comm.size
        and facts["place"] == f"{last},h,0"
        and list(facts["explanation"]["moved"]) == ["A", "B", "C"]
        and set(facts["explanation"]["moved"]["B"]) >= {"host_to_device"}
        and facts["device"].startswith(
            f"host backend, {comm.size} rank" if facts["backend"] == "host" else f"{comm.size} ×"
        )
        and all(facts[name] for name in ("mpi", "python", "numpy", "mpi4py", "blas", "backend_reason", "cores"))
        and 0 < facts["min_s"] <= facts["median_s"] <= facts["max_s"]
    )
    collective_assert(comm, good, f"status {status}\n{out}\n{err}\n{facts}")


def test_a_call_that_takes_long_is_shown_with_its_number(comm, job, folder, monkeypatch):
    titles: list[str] = []

    def watch(title, progress):
        titles.append(f"{title} {progress():.0f}")
        return contextlib.nullcontext()

    monkeypatch.setattr(command_product, "watch", watch)
    monkeypatch.setattr(command_product, "_LONG_S", -1.0)
    status, out, err = job(["-m", "64", "--warmup", "2", "--repeat", "2"])
    calls = "first call", "warm-up 1 of 2", "warm-up 2 of 2", "timed call 1 of 2", "timed call 2 of 2"
    wanted = [f"multiplying, {which}" for which in calls]
    shown = [title.rpartition(" ")[0] for title in titles]
    collective_assert(comm, status == 0 and shown == (wanted if comm.rank == 0 else []), f"{titles}\n{out}\n{err}")
    titles.clear()
    status, out, err = job([folder / "A.npy", folder / "B.npy", "-o", folder / "long.npy"])
    shown = [title.rpartition(" ")[0] for title in titles]
    collective_assert(comm, status == 0 and shown == ["multiplying"] * (comm.rank == 0), f"{titles}\n{out}\n{err}")


@pytest.mark.parametrize("suffix", ["json", "png", "txt"])
def test_a_trace_shows_predicted_above_measured(comm, job, mpi_tmp_path, suffix):
    if suffix == "png":
        pytest.importorskip("matplotlib")
    path = mpi_tmp_path / f"trace.{suffix}"
    status, out, err = job([*SMALL, "--trace", path])
    good = status == 0 and not err and f"trace       {path}: predicted " in out and out.endswith("PASS\n")
    collective_assert(comm, good and path.exists(), f"status {status}\n{out}\n{err}")
    content = path.read_bytes()
    if suffix == "json":
        trace = json.loads(content)
        check_trace(trace)
        good = trace["otherData"]["timelines"] == ["predicted", "measured"]
    elif suffix == "txt":
        good = 0 <= content.decode().find("predicted, ") < content.decode().find("measured, ")
    else:
        good = content.startswith(b"\x89PNG")
    collective_assert(comm, good, content[:200])


@pytest.mark.host_backend
def test_a_wrong_traced_call_fails_the_check(comm, job, monkeypatch, mpi_tmp_path):
    calls: list[bool] = []
    original = HostExecutable.start

    def begin(self, **arguments):
        calls.append(arguments.get("traced", False))
        return original(self, **arguments)

    def corrupt(task, code, region):
        if code is Code.GEMM and comm.rank == comm.size - 1 and calls[-1] and region.size:
            region[0, 0] += 1.0

    monkeypatch.setattr(HostExecutable, "start", begin)
    monkeypatch.setattr(start, "make_host", lambda rank, ranks: FaultyBackend(rank, ranks, fault=corrupt))
    status, out, _ = job([*SMALL, *ON_ALL_RANKS, "--trace", mpi_tmp_path / "t.json"])
    good = status == 1 and "FAIL" in out.splitlines()[-1] and calls[-1] and not any(calls[:-1])
    collective_assert(comm, good, f"status {status} {calls}\n{out}")


def test_a_trace_that_cannot_be_written_is_refused_before_any_work(comm, job, mpi_tmp_path):
    status, out, err = job([*SMALL, "--trace", mpi_tmp_path / "missing" / "t.json"])
    collective_assert(comm, status == 2 and "--trace" in err and "no directory" in err and not out, err)


@pytest.mark.host_backend
def test_an_error_of_one_rank_reaches_every_exit_status(comm, capfd, monkeypatch):
    def fail(task, code, region):
        if comm.rank == comm.size - 1 and code is Code.GEMM:
            raise OSError("broken on purpose")

    monkeypatch.setattr(start, "make_host", lambda rank, ranks: FaultyBackend(rank, ranks, fault=fail))
    if comm.size == 1:
        with pytest.raises(OSError, match="on purpose"):
            main([*SMALL, *ON_ALL_RANKS, "--backend", "host"], comm)
        return
    comm.Barrier()
    try:
        status, found = main([*SMALL, *ON_ALL_RANKS, "--backend", "host"], comm), ""
    except OSError as error:  # on the rank that it arose on, for the abort hook to print
        status, found = finish(comm, 2), str(error)
    finally:
        capfd.readouterr()
    statuses = allgather(comm, status)
    collective_assert(comm, 0 not in statuses, f"{statuses} {found}")


def test_no_check_says_unchecked(comm, job):
    status, out, _ = job([*SMALL, "--no-check"])
    collective_assert(comm, status == 0 and out.splitlines()[-1] == "UNCHECKED", out)


@pytest.mark.parametrize("place", [None, "0,h,{last}", "{last},0,0", "h{last},{last},h0"])
def test_files_in_c_and_fortran_order_go_to_any_place(comm, job, folder, place):
    out_path = folder / "OUT.npy"
    where = [] if place is None else ["--place", place.format(last=comm.size - 1)]
    for words, beta in (([], 0.0), (["-c", folder / "C.npy", "--beta", "0.5"], 0.5)):
        status, out, err = job(
            [folder / "A.npy", folder / "B.npy", *words, "-o", out_path, "--overwrite", "--alpha", "2", *where]
        )
        a, b, c, found = (np.load(folder / f"{name}.npy") for name in ("A", "B", "C", "OUT"))
        wanted = 2.0 * a @ b + beta * c
        good = (
            status == 0 and np.allclose(found, wanted, rtol=0, atol=1e-12) and found.flags.c_contiguous == bool(words)
        )
        collective_assert(comm, good, f"status {status} {out}{err}")


def test_files_are_multiplied_and_verified_without_an_output(comm, job, folder):
    before = sorted(os.listdir(folder))
    status, out, err = job([folder / "A.npy", folder / "B.npy"])
    collective_assert(comm, status == 0 and before == sorted(os.listdir(folder)), f"{out}{err}")
    collective_assert(comm, comm.rank > 0 or "PASS" in out, out)
    status, _, err = job([folder / "A.npy", folder / "B.npy", "--host-memory", "100kB"])
    collective_assert(comm, status == 2 and "add -o OUT.npy" in err, err)


def test_bfloat16_files(comm, job, folder):
    words = [folder / "Abf16.npy", folder / "Bbf16.npy", "-o", folder / "OUTbf16.npy"]
    status, _, err = job(words)
    collective_assert(comm, status == 2 and "dtype bf16" in err, err)
    status, _, err = job([*words, "--dtype", "bf16"])
    a, b = (np.load(folder / f"{name}bf16.npy").view(ml_dtypes.bfloat16).astype(np.float64) for name in "AB")
    found = np.load(folder / "OUTbf16.npy").view(ml_dtypes.bfloat16).astype(np.float64)
    collective_assert(comm, status == 0 and np.allclose(found, a @ b, rtol=2**-7, atol=2**-7), err)


@pytest.mark.parametrize(
    ("names", "more", "parts"),
    [
        (("missing", "B"), (), ["missing.npy"]),
        (("short", "B"), (), ["short.npy", "truncated"]),
        (("text", "B"), (), ["text.npy", "not a .npy file"]),
        (("cube", "B"), (), ["cube.npy", "3 dimensions, a matrix has two"]),
        (("whole", "B"), (), ["whole.npy", "int64"]),
        (("A32", "B"), (), ["f32", "f64"]),
        (("A", "B"), ("--dtype", "f32"), ["dtype f32 was given"]),
        (("A", "C"), (), ["60×40", "60×50"]),
        (("A", "B"), ("--beta", "2"), ["beta", "-c C.npy"]),
        (("A", "B"), ("-m", "5"), ["-m 5"]),
        (("A", "B"), ("--place", "99,h,h"), ["99"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_files_give_one_error_and_no_output(comm, job, folder, names, more, parts):
    out_path = folder / "never.npy"
    files = [folder / f"{name}.npy" for name in names]
    status, _, err = job([*files, "-o", out_path, *more])
    left = [name for name in os.listdir(folder) if "never" in name or name.endswith(".part")]
    good = status == 2 and err.count("\n") == 1 and all(part in err for part in parts) and not left
    collective_assert(comm, good, f"status {status}, left {left}: {err}")


@pytest.mark.mpi(min_size=2)
def test_cores_are_counted_of_each_node_also_where_nodes_have_one_name(comm, job, mpi_tmp_path, monkeypatch):
    path = mpi_tmp_path / "facts.json"
    monkeypatch.setattr(command_job, "node_identity", lambda: f"node {comm.rank}")
    status, out, err = job([*SMALL, "--json", path])
    wanted, said = sum(allgather(comm, len(os.sched_getaffinity(0)))), json.loads(path.read_text())["cores"]
    collective_assert(comm, status == 0 and said == wanted, f"{said}, not {wanted}; {out}{err}")


def test_an_output_that_exists_is_kept(comm, job, folder):
    status, _, err = job([folder / "A.npy", folder / "B.npy", "-o", folder / "there.npy"])
    kept = (folder / "there.npy").read_text() == "keep me"
    collective_assert(comm, status == 2 and "--overwrite" in err and kept, err)


@pytest.mark.host_backend
def test_a_failed_check_writes_no_output(comm, job, folder, monkeypatch):
    def corrupt(task, code, region):
        if code is Code.COPY and region.size > 1 and comm.rank == 0:
            region[0, 0] += 1.0

    monkeypatch.setattr(start, "make_host", lambda rank, ranks: FaultyBackend(rank, ranks, fault=corrupt))
    path = folder / "wrong.npy"
    status, out, _ = job([folder / "A.npy", folder / "B.npy", "-o", path, *ON_ALL_RANKS])
    good = status == 1 and "FAIL" in out.splitlines()[-1] and not path.exists()
    collective_assert(comm, good, f"status {status}\n{out}")


def spoil(folder, comm) -> None:
    """Save A.npy and C.npy again with elements that are not finite."""
    if comm.rank == 0:
        a, c = np.load(folder / "A.npy"), np.load(folder / "C.npy")
        a[3, 4], a[50, 0], c[7, 8] = np.nan, -np.inf, np.inf
        np.save(folder / "Abad.npy", a)
        np.save(folder / "Cbad.npy", c)
    comm.Barrier()


def test_nan_and_infinity_of_files_are_named_and_verified_where_they_spread_to(comm, job, folder):
    spoil(folder, comm)
    words = [folder / "Abad.npy", folder / "B.npy", "-c", folder / "Cbad.npy", "-o", folder / "SPREAD.npy"]
    json_path = folder / "spread.json"
    status, out, err = job([*words, "--json", json_path])
    a, b, c, found = (np.load(folder / f"{name}.npy") for name in ("Abad", "B", "Cbad", "SPREAD"))
    wanted = a @ b + c
    facts = json.loads(json_path.read_text())
    good = (
        status == 0
        and out.rstrip().endswith("PASS")
        and "Abad.npy (A) holds 1 NaN and 1 infinite elements, the first at row 3, column 4 (from 0)" in out
        and "Cbad.npy (C) holds 1 infinite element, the first at row 7, column 8" in out
        and "101 must be NaN or infinite" in out
        and np.allclose(found, wanted, rtol=0, atol=1e-12, equal_nan=True)
        and [one["matrix"] for one in facts["nonfinite_inputs"]] == ["A", "C"]
    )
    collective_assert(comm, good, f"status {status} {out}{err}")
    # What is not read is not spoken of: A without alpha, C without beta.
    unread = [*words[:-1], folder / "UNREAD.npy", "--alpha", "0", "--beta", "0"]
    status, out, err = job(unread)
    collective_assert(comm, status == 0 and "holds" not in out, f"status {status} {out}{err}")


def test_nan_in_files_too_large_for_a_check_of_every_element_is_refused(comm, job, folder, monkeypatch):
    spoil(folder, comm)
    monkeypatch.setattr(command_job, "FULL_CHECK_LIMIT", 1000)
    words = [folder / "Abad.npy", folder / "B.npy", "-o", folder / "REFUSED.npy"]
    status, out, err = job(words)
    good = status == 2 and "Abad.npy (A) holds 1 NaN and 1 infinite" in err and "--no-check" in err and not out
    collective_assert(comm, good and not (folder / "REFUSED.npy").exists(), f"status {status} {out}{err}")
    status, out, err = job([*words, "--no-check"])
    good = status == 0 and "Abad.npy (A) holds" in out and out.rstrip().endswith("UNCHECKED")
    collective_assert(comm, good and (folder / "REFUSED.npy").exists(), f"status {status} {out}{err}")
    # Without alpha nothing is multiplied: every element is compared, whatever k is.
    scaled = [*words[:-1], folder / "SCALED.npy", "-c", folder / "Cbad.npy", "--alpha", "0"]
    status, out, err = job(scaled)
    collective_assert(comm, status == 0 and out.rstrip().endswith("PASS"), f"status {status} {out}{err}")


def test_unknown_options_and_help(comm, job):
    status, _, err = job(["--no-such-option"])
    collective_assert(comm, status == 2 and "--no-such-option" in err, err)
    status, out, _ = job(["--help"])
    edges = "default {cuda} on GPUs, {host} on the host backend".format(**command_job._DEFAULT_EDGE)
    collective_assert(comm, status == 0 and "--place" in out and edges in " ".join(out.split()), out)


@pytest.mark.mpi(min_size=2)
def test_ranks_with_different_command_lines(comm, capfd, backend_name):
    words = [*SMALL, "--backend", backend_name, "--alpha", "1" if comm.rank else "2"]
    comm.Barrier()
    capfd.readouterr()
    status = main(words, comm)
    err = allgather(comm, capfd.readouterr().err)[0]
    collective_assert(comm, status == 2 and "command line" in err and "rank 0" in err, err)


def test_an_output_that_is_an_input_is_refused(comm, job, folder):
    words = [folder / "A.npy", folder / "B.npy", "-o", folder / "A.npy", "--overwrite"]
    status, _, err = job(words)
    kept = np.load(folder / "A.npy").shape == (60, 40)
    collective_assert(comm, status == 2 and "file of A" in err and kept, err)


def test_a_report_replaces_no_input(comm, job, folder):
    before = (folder / "A.npy").read_bytes() if comm.rank == 0 else None
    words = [folder / "A.npy", folder / "B.npy", "-o", folder / "KEPT.npy", "--json", folder / "A.npy"]
    status, out, err = job(words)
    good = status == 2 and "which is read" in err and not out
    kept = comm.rank != 0 or (folder / "A.npy").read_bytes() == before
    collective_assert(comm, good and kept and not (folder / "KEPT.npy").exists(), f"status {status} {out}{err}")


def test_schedules_are_tried_and_the_fastest_is_reported(comm, job, mpi_tmp_path):
    path = mpi_tmp_path / "out.json"
    status, text, _ = job(["-m", "200", "--tune", "4", "--warmup", "0", "--repeat", "2", "--json", path])
    value = json.loads(path.read_text())
    good = status == 0 and value["passed"] and len(value["samples_s"]) == 2 and 1 <= value["tried"] <= 4
    collective_assert(comm, good, text)
    said = f"fastest of {value['tried']} tried: auto" in text
    collective_assert(comm, said == (value["tried"] > 1), text)
    for words, part in (
        (["--tune", "3", "--scheduler", "uncut"], "--tune with --scheduler uncut"),
        (["--tune", "99"], "at most 16 schedules"),
    ):
        status, _, err = job(words)
        collective_assert(comm, status == 2 and part in err, err)


@pytest.mark.one_node("a machine that is measured as one")
def test_a_plan_for_the_least_energy_is_made_where_power_is_known(comm, job, mpi_tmp_path, monkeypatch):
    path, base = mpi_tmp_path / "energy.json", mpi_tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(base))
    words = ["-m", "96", "--warmup", "0", "--repeat", "1", "--metric", "pdp", "--json", path]
    status, _, err = job(words)
    (kept,) = base.rglob("*.json")
    content = json.loads(kept.read_text())
    known = min(content["busy_watts"]) > 0
    collective_assert(comm, known or (status == 2 and "metric pdp needs the devices' power" in err), err)
    if comm.rank == 0:
        watts = {"idle_watts": [50.0] * comm.size, "busy_watts": [400.0] * comm.size}
        kept.write_text(json.dumps({**content, **watts, "steady": True}))
    status, out, err = job(words)
    facts = json.loads(path.read_text())
    good = status == 0 and facts["passed"] and facts["metric"] == "pdp" and ") for the least pdp, " in out
    collective_assert(comm, good, f"status {status} {out}{err}")
    for more, part in (
        (["--scheduler", "uncut"], "--metric with --scheduler uncut"),
        (["--tune", "4"], "--metric with --tune"),
    ):
        status, _, err = job([*words, *more])
        collective_assert(comm, status == 2 and part in err, err)


def test_a_searched_plan_is_called_so(comm, job, mpi_tmp_path):
    path = mpi_tmp_path / "auto.json"
    status, out, err = job(["-m", "96", "--warmup", "0", "--repeat", "1", "--scheduler", "auto", "--json", path])
    facts = json.loads(path.read_text())
    # What is best of one tile's problem differs from machine to machine.
    known = {f"auto ({one})" for one in SEARCHED}
    good = status == 0 and facts["scheduler"] in known and f"{facts['scheduler']}, " in out and "by simulation" in out
    collective_assert(comm, good, f"status {status} {out}{err}")
    status, _, err = job(["-m", "96", "--scheduler", "auto", "--compute-ranks", "0,99"])
    collective_assert(comm, status == 2 and "99" in err and "Traceback" not in err, err)


def test_a_result_that_is_only_scaled_is_planned_and_bounded_as_such(comm, job, mpi_tmp_path):
    path = mpi_tmp_path / "scaled.json"
    status, out, err = job([*SMALL, "--alpha", "0", "--json", path])
    facts = json.loads(path.read_text())
    good = status == 0 and "operations" not in facts["bound_formula"] and "(A " not in facts["bound_formula"]
    collective_assert(comm, good and facts["passed"] is True, f"status {status} {out}{err}")


def test_the_env_command_says_all_on_rank_0_and_what_differs_on_others(comm, capfd, mpi_tmp_path, monkeypatch):
    monkeypatch.setenv("UNCUT_ODD", str(comm.rank))
    status, out, err = in_process(lambda words, comm: env.main(words), comm, capfd)(["--json", mpi_tmp_path / "e"])
    of_ranks = json.loads((mpi_tmp_path / "e").read_text())
    good = (status, err) == (0, "") and len(of_ranks) == comm.size and of_ranks[0].keys() == of_ranks[1].keys()
    good &= out.count("\npython ") == 1 and f"{comm.size} ranks on " in of_ranks[0]["job"][0]
    good &= out.endswith("variables   rank 1: UNCUT_ODD=1\n") and "UNCUT_ODD=0" in of_ranks[0]["variables"]
    collective_assert(comm, good, f"status {status}\n{out}{err}{of_ranks}")
