"""The gemm command as a tool: files multiplied once, machines to plan for, and paths that are not what a flag needs."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from tests.helpers.collective import collective_assert, once
from tests.helpers.commands import in_process
from tests.helpers.hostile import interrupt
from tests.helpers.sessions import SHARED
from uncut_mpi import unfinished
from uncut_mpi.api.gemm_plan import GemmPlan
from uncut_mpi.api.matrix_files import MatrixFile, OutputFile
from uncut_mpi.command import streaming, streams
from uncut_mpi.errors import DataFileError
from uncut_mpi.gemm import main
from uncut_mpi.model.costs import Disk
from uncut_mpi.model.machine import Machine

ONCE = ["-m", "64", "--warmup", "0", "--repeat", "1"]


@pytest.fixture
def job(comm, capfd, backend_name, machine_cache, monkeypatch):
    """Runs the command in this process; returns (status, everything rank 0 printed, its errors)."""
    monkeypatch.setenv("XDG_CACHE_HOME", machine_cache)
    return in_process(main, comm, capfd, ["--backend", backend_name])


@pytest.fixture
def folder(mpi_tmp_path, comm):
    """Matrix files, written by rank 0, and a named pipe."""
    if comm.rank == 0:
        rng = np.random.default_rng(5)
        for name, shape in (("A", (30, 20)), ("B", (20, 40)), ("C", (30, 40))):
            np.save(mpi_tmp_path / f"{name}.npy", rng.uniform(-1, 1, shape))
        with open(mpi_tmp_path / "A3.npy", "wb") as file:
            np.lib.format.write_array(file, np.load(mpi_tmp_path / "A.npy"), version=(3, 0))
        np.save(mpi_tmp_path / "E.npy", np.zeros((0, 20)))
        os.mkfifo(mpi_tmp_path / "pipe")
    comm.Barrier()
    return mpi_tmp_path


@pytest.fixture
def calls(monkeypatch):
    """How often a product is executed."""
    counted = []
    execute = GemmPlan.execute
    monkeypatch.setattr(
        GemmPlan, "execute", lambda self, *more, **named: counted.append(1) or execute(self, *more, **named)
    )
    return counted


def is_product(folder, out_path, beta=0.0):
    a, b, c, found = (np.load(path) for path in (folder / "A.npy", folder / "B.npy", folder / "C.npy", out_path))
    return np.allclose(found, a @ b + beta * c, rtol=0, atol=1e-12)


def test_files_are_multiplied_once_and_checked(comm, job, folder, calls):
    out_path, facts_path = folder / "OUT.npy", folder / "facts.json"
    words = [folder / "A3.npy", folder / "B.npy", "-c", folder / "C.npy", "-o", out_path]
    status, out, err = job([*words, "--json", facts_path])
    facts = json.loads(facts_path.read_text())
    labels = {line.split(" ")[0] for line in out.splitlines() if line[:1] not in "# "}
    good = (
        status == 0
        and len(calls) == 1
        and is_product(folder, out_path, 1.0)
        and out.endswith("PASS\n")
        and "took        " in out
        and not labels & {"calls", "rate", "bound", "first"}
        and "median" not in out
        and facts["samples_s"] == []
        and facts["first_call_s"] > 0
        and facts["passed"] is True
        and all(facts[name] is None for name in ("median_s", "min_s", "max_s", "tflop_per_s"))
    )
    collective_assert(comm, good, f"status {status}, {len(calls)} calls {out}{err}{facts}")


@pytest.mark.parametrize(("words", "count"), [(["--repeat", "3"], 6), (["--repeat", "2", "--warmup", "0"], 3)])
def test_files_are_measured_where_that_is_asked_for(comm, job, folder, calls, words, count):
    out_path = folder / "OUT.npy"
    status, out, err = job([folder / "A.npy", folder / "B.npy", "-o", out_path, *words])
    good = status == 0 and len(calls) == count and is_product(folder, out_path) and "\ncalls       median " in out
    collective_assert(comm, good, f"status {status}, {len(calls)} calls {out}{err}")


def test_a_single_product_may_be_traced(comm, job, folder, calls):
    out_path, trace = folder / "OUT.npy", folder / "t.txt"
    status, out, err = job([folder / "A.npy", folder / "B.npy", "-o", out_path, "--trace", trace])
    good = status == 0 and len(calls) == 1 and trace.exists() and is_product(folder, out_path) and "trace  " in out
    collective_assert(comm, good, f"status {status}, {len(calls)} calls {out}{err}")


@pytest.mark.parametrize("words", [["-m", "0"], ["-m", "5", "-n", "0", "-k", "7"]])
def test_a_result_without_elements_is_not_called_right(comm, job, mpi_tmp_path, words):
    path = mpi_tmp_path / "facts.json"
    status, out, err = job([*words, "--warmup", "0", "--repeat", "1", "--json", path])
    facts = json.loads(path.read_text())
    good = (
        status == 0
        and out.endswith("UNCHECKED\n")
        and "check       nothing to check: C is " in out
        and facts["passed"] is None
        and facts["check_detail"].startswith("nothing to check")
    )
    collective_assert(comm, good, f"status {status} {out}{err}")


def test_an_empty_file_is_multiplied_and_says_so(comm, job, folder):
    out_path = folder / "OUT.npy"
    status, out, err = job([folder / "E.npy", folder / "B.npy", "-o", out_path])
    good = status == 0 and np.load(out_path).shape == (0, 40) and "nothing to check" in out
    collective_assert(comm, good, f"status {status} {out}{err}")


@pytest.mark.one_node("the name of a machine of one node")
def test_plans_are_made_for_the_machine_that_is_named(comm, job, mpi_tmp_path):
    path, facts_path = mpi_tmp_path / "mine.json", mpi_tmp_path / "facts.json"
    once(comm, lambda: path.write_text(Machine.uniform(comm.size, name="mine").to_json()))
    for name, said in (("uniform", "uniform"), (path, "mine")):
        status, out, err = job([*ONCE, "--machine", name, "--json", facts_path])
        good = status == 0 and f"# machine   {said}\n" in out and json.loads(facts_path.read_text())["machine"] == said
        collective_assert(comm, good, f"status {status} {out}{err}")


@pytest.mark.one_node("the name of a machine of one node")
def test_a_machine_that_does_not_fit_is_refused(comm, job, mpi_tmp_path):
    path = mpi_tmp_path / "other.json"
    once(comm, lambda: path.write_text(Machine.uniform(comm.size + 1, name="other").to_json()))
    once(comm, lambda: os.mkfifo(mpi_tmp_path / "pipe"))
    for name, said in (
        (path, f"machine other has {comm.size + 1} ranks, the session has {comm.size}"),
        ("nowhere", "neither one that ships"),
        (mpi_tmp_path / "pipe", "named pipe"),
        ("", "not the name of a file"),
    ):
        status, out, err = job([*ONCE, "--machine", name])
        good = status == 2 and said in err and err.count("\n") == 1 and not out
        collective_assert(comm, good, f"status {status} {out}{err}")
    status, _, err = job([*ONCE, "--machine", path, "--json", path])
    collective_assert(comm, status == 2 and "has" in err and path.read_text().startswith("{"), err)


def test_paths_that_would_make_a_command_wait_are_refused(comm, job, folder, monkeypatch):
    pipe, a, b, out_path = folder / "pipe", folder / "A.npy", folder / "B.npy", folder / "OUT.npy"
    for words, said in (
        ([pipe, b, "-o", out_path], "named pipe"),
        ([a, pipe, "-o", out_path], "named pipe"),
        ([a, b, "-c", pipe, "-o", out_path], "named pipe"),
        ([a, b, "-o", pipe, "--overwrite"], "not a regular file"),
        ([a, b, "-o", "/dev/stdout", "--overwrite"], "stream of this process"),
        ([a, b, "-o", "-", "--overwrite"], "stream of this process"),
        ([a, b, "-o", out_path, "--json", folder / "." / "x" / ".." / "OUT.npy"], "one file"),
    ):
        status, out, err = job(words)
        good = status == 2 and said in err and err.count("\n") == 1 and not out and not out_path.exists()
        collective_assert(comm, good, f"{words} status {status} {out}{err}")
    # The result is there, what was found is said, and so is why the facts are not.
    status, out, err = job([a, b, "-o", out_path, "--json", pipe])
    good = status == 2 and "nobody reads" in err and is_product(folder, out_path) and out.endswith("PASS\n")
    collective_assert(comm, good, f"status {status} {out}{err}")


def test_facts_on_standard_output_are_alone_there(comm, job, folder):
    out_path = folder / "OUT.npy"
    status, out, err = job([folder / "A.npy", folder / "B.npy", "-o", out_path, "--json", "-"])
    good = status == 0 and is_product(folder, out_path) and json.loads(out)["passed"] is True
    collective_assert(comm, good and err.endswith("PASS\n"), f"status {status} {out}{err}")
    status, out, err = job([folder / "A.npy", folder / "A.npy", "-o", out_path, "--overwrite", "--json", "-"])
    collective_assert(comm, status == 2 and "ParamError" in err and not out, f"status {status} {out}{err}")


def test_a_report_that_cannot_be_written_is_a_status_and_loses_no_file(comm, job, folder, monkeypatch):
    monkeypatch.setattr(streams, "to_output", lambda text: "is closed" if text else "")
    out_path, facts = folder / "OUT.npy", folder / "facts.json"
    status, out, err = job([folder / "A.npy", folder / "B.npy", "-o", out_path, "--json", facts])
    good = status == 2 and "standard output is closed" in err and err.count("\n") == 1 and not out
    collective_assert(comm, good and is_product(folder, out_path), f"status {status} {out}{err}")
    collective_assert(comm, json.loads(facts.read_text())["passed"] is True, facts)


def test_a_result_that_cannot_be_written_is_reported_all_the_same(comm, job, folder, monkeypatch):
    def full(self):
        self.discard()
        raise DataFileError("OUT.npy cannot be completed: No space left on device")

    monkeypatch.setattr(OutputFile, "commit", full)
    status, out, err = job([folder / "A.npy", folder / "B.npy", "-o", folder / "OUT.npy"])
    good = status == 2 and "No space left" in err and err.count("\n") == 1 and out.endswith("PASS\n")
    collective_assert(comm, good and not (folder / "OUT.npy").exists(), f"status {status} {out}{err}")


@pytest.mark.host_backend
def test_an_interrupt_while_files_are_written_leaves_none_half_written(comm, job, folder, monkeypatch):
    facts = folder / "facts.json"
    if comm.size > 1:
        return  # the others of a job end with it, and this test's ranks are to live on
    for module, name in ((OutputFile, "commit"), (unfinished, "write_all")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, interrupt)
            out_path = folder / f"{name}.npy"
            with pytest.raises(KeyboardInterrupt):
                main(
                    [
                        "--backend",
                        "host",
                        *map(str, [folder / "A.npy", folder / "B.npy", "-o", out_path, "--json", facts]),
                    ],
                    comm,
                )
        assert not facts.exists()
        assert not [one for one in os.listdir(folder) if one.endswith(".part")]
        assert out_path.exists() == (name == "write_all")


@pytest.mark.parametrize(
    "place",
    [
        pytest.param("rows,cols@host,rows@shared", marks=SHARED.marks),
        "replicated,rows@host,cols",
        "cols,rows,h",
        "rows@host,h,replicated@host",
    ],
)
def test_generated_matrices_are_dealt_and_the_report_says_how(comm, job, mpi_tmp_path, place):
    facts_path = mpi_tmp_path / "facts.json"
    status, out, err = job([*ONCE, "-n", "50", "-k", "70", "--trans-a", "T", "--place", place, "--json", facts_path])
    good = status == 0 and out.endswith("PASS\n") and f"A, B, C at {place}" in out
    collective_assert(comm, good and json.loads(facts_path.read_text())["place"] == place, f"{status}: {out}{err}")


@pytest.mark.one_node("each rank reads its part of a file")
def test_files_are_read_by_those_who_have_their_elements(comm, job, folder, monkeypatch):
    reads = []
    read_into = MatrixFile.read_into

    def record(self, out, lines=slice(None), within=slice(None)):
        length = self.rows + self.cols - self.num_lines
        reads.append((os.path.basename(self.path), lines.indices(self.num_lines)[:2], within.indices(length)[:2]))
        read_into(self, out, lines, within)

    monkeypatch.setattr(MatrixFile, "read_into", record)
    out_path = folder / "DEALT.npy"
    files = [folder / "A.npy", folder / "B.npy", "-c", folder / "C.npy", "-o", out_path]
    status, out, err = job([*files, "--place", f"rows,cols@host,whole({comm.size - 1})"])
    rows, cols = (np.array_split(range(extent), comm.size)[comm.rank] for extent in (30, 40))
    wanted = [("A.npy", (rows[0], rows[-1] + 1), (0, 20)), ("B.npy", (0, 20), (cols[0], cols[-1] + 1))]
    if comm.rank == comm.size - 1:
        wanted.append(("C.npy", (0, 30), (0, 40)))
    collective_assert(comm, status == 0 and is_product(folder, out_path, 1.0), f"{status}: {out}{err}")
    collective_assert(comm, reads == wanted, f"read {reads}, not {wanted}")


@pytest.fixture
def large(mpi_tmp_path, comm):
    """Matrix files of half a megabyte each, and what they hold."""
    arrays = [np.random.default_rng(seed).uniform(-1, 1, (250, 250)) for seed in range(3)]
    if comm.rank == 0:
        for name, array, order in zip("ABC", arrays, "CFC", strict=True):
            np.save(mpi_tmp_path / f"{name}.npy", np.array(array, order=order))
    comm.Barrier()
    return mpi_tmp_path, arrays


@pytest.mark.parametrize(
    "words", [[], ["-c", "C.npy", "--beta", "0.5", "--repeat", "2"], ["--no-check", "--trans-a", "T"]]
)
def test_files_are_multiplied_where_they_are_through_little_memory(comm, job, large, words):
    folder, (a, b, c) = large
    out_path, facts_path = folder / "OUT.npy", folder / "facts.json"
    words = [folder / word if word == "C.npy" else word for word in words]
    files = [folder / "A.npy", folder / "B.npy", "-o", out_path, "--json", facts_path]
    status, out, err = job([*files, *words, "--host-memory", "100kB"])
    wanted = (a.T if "--trans-a" in words else a) @ b + (0.5 * c if "-c" in words else 0)
    good = status == 0 and np.allclose(np.load(out_path), wanted, rtol=0, atol=1e-12)
    good = (
        good
        and "stay on the disk and go through host memory" in out
        and "of host memory for copies, of" in out
        and ("PASS" in out) == ("--no-check" not in words)
    )
    collective_assert(comm, good, f"{status}: {out}{err}")
    facts = json.loads(facts_path.read_text())
    collective_assert(
        comm, (facts["passed"], len(facts["staged"])) == (None if "--no-check" in words else True, 1), out
    )
    collective_assert(comm, facts["place"] == "f,f,f", out)


def test_no_product_of_files_is_faster_than_their_disk(comm, job, large):
    folder, (a, b, _) = large
    facts_path = folder / "facts.json"
    files = [folder / "A.npy", folder / "B.npy", "-o", folder / "OUT.npy", "--json", facts_path]
    status, out, err = job([*files, "--host-memory", "100kB", "--machine", "uniform"])
    collective_assert(comm, status == 0, f"{status}: {out}{err}")
    facts = json.loads(facts_path.read_text())
    read_s = (a.nbytes + b.nbytes) / (Disk().read_gb_per_s * 1e9)
    collective_assert(comm, facts["bound_s"] >= 0.999 * read_s, facts["bound_formula"])


def test_files_larger_than_what_is_free_are_multiplied_where_they_are(comm, job, large, monkeypatch):
    folder, (a, b, _) = large
    files = [folder / "A.npy", folder / "B.npy", "-o", folder / "OUT.npy"]
    status, out, err = job(files)
    collective_assert(comm, status == 0 and "stay on the disk" not in out, f"{status}: {out}{err}")
    monkeypatch.setattr(streaming, "available_bytes", lambda: (1_500_000, "a test"))
    status, out, err = job([*files, "--overwrite"])
    good = status == 0 and np.allclose(np.load(folder / "OUT.npy"), a @ b, rtol=0, atol=1e-12)
    collective_assert(comm, good and "stay on the disk" in out, f"{status}: {out}{err}")
    status, out, err = job([*files, "--overwrite", "--place", "0,h,h"])
    collective_assert(comm, status == 2 and "not placed elsewhere" in err, f"{status}: {out}{err}")


def test_a_file_that_becomes_shorter_in_the_call_leaves_no_output(comm, job, large, monkeypatch):
    folder, _ = large
    execute = GemmPlan.execute

    def shortened(self, *more, **named):
        once(comm, lambda: os.truncate(folder / "B.npy", 1000))
        return execute(self, *more, **named)

    monkeypatch.setattr(GemmPlan, "execute", shortened)
    out_path, facts = folder / "OUT.npy", folder / "facts.json"
    words = [folder / "A.npy", folder / "B.npy", "-o", out_path, "--json", facts, "--host-memory", "100kB"]
    status, out, err = job(words)
    good = status == 2 and "B.npy changed while it was in use: it has become shorter" in err
    good = good and not out_path.exists() and not facts.exists()
    good = good and not [one for one in os.listdir(folder) if one.endswith(".part")]
    collective_assert(comm, good, f"{status}: {out}{err}")
