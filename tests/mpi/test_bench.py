"""The bench command on several ranks: its results, going on after an interruption, what cannot be done."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest

import uncut_mpi.bench.job as bench_job
import uncut_mpi.bench.measure as bench_measure
from tests.helpers.collective import collective_assert, once
from uncut_mpi.bench import main
from uncut_mpi.bench.datasets import Case
from uncut_mpi.bench.processes import BaselineProcess, SharedTask
from uncut_mpi.errors import CapacityError, DeviceError, agreed
from uncut_mpi.model.arguments import there_are

SMALL = [
    *("--backend", "host", "--scale", "0.004", "--warmup", "1", "--repeat", "3", "--time-cap", "0.05"),
    *("--methods", "auto,uncut,one"),
]


@pytest.fixture(autouse=True)
def own_cache(machine_cache, monkeypatch):
    """Machines measured here stay here."""
    monkeypatch.setenv("XDG_CACHE_HOME", machine_cache)


def run(comm, path, *words):
    return main([*SMALL, "--output", str(path), *words], comm)


def results(comm, path):
    comm.Barrier()
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_results_are_complete_and_a_second_run_goes_on_where_the_first_ended(comm, mpi_tmp_path, capfd):
    path = mpi_tmp_path / "bench.jsonl"
    collective_assert(comm, run(comm, path, "--sample", "2") == 0)
    rows = results(comm, path)
    collective_assert(comm, len(rows) == 6 and all(row["passed"] for row in rows), str(rows))
    for row in rows:
        good = row["bound_s"] <= row["median_s"] and row["min_s"] <= row["median_s"] <= row["max_s"]
        collective_assert(comm, good and len(row["samples_s"]) == 3 and row["digest"], str(row))
        collective_assert(
            comm, row["ranks"] == comm.size and row["compute"] == (1 if row["method"] == "one" else comm.size)
        )
    before = path.read_bytes()
    once(comm, lambda: path.write_bytes(before + b'{"m": 16, "n"'))  # the job was ended while it wrote
    collective_assert(comm, run(comm, path, "--sample", "3") == 0)
    again = results(comm, path)
    collective_assert(comm, path.read_bytes().startswith(before) and len(again) > len(rows), str(len(again)))
    keys = [tuple(row[name] for name in bench_job._KEY) for row in again]
    collective_assert(comm, len(set(keys)) == len(keys), "measured twice")
    said = capfd.readouterr().out
    collective_assert(comm, ("auto against uncut" in said) == (comm.rank == 0), said)


def test_rounds_have_every_method_in_turn_and_settings_of_the_first(comm, mpi_tmp_path, monkeypatch):
    measure, measured = bench_measure.Measurer.measure, []
    ask, asked = BaselineProcess.ask, []
    verify, verified = bench_measure.check_result, []

    def noted(self, one, product, *, last):
        measured.append((one.case, one.method))
        return measure(self, one, product, last=last)

    def checked(*arguments):
        verified.append(len(measured))
        return verify(*arguments)

    def listening(self, message, *patience):
        answer = ask(self, message, *patience)
        if message["do"] == "begin":
            asked.append((message["settings"], answer["setting"]))
        return answer

    monkeypatch.setattr(bench_measure.Measurer, "measure", noted)
    monkeypatch.setattr(bench_measure, "check_result", checked)
    monkeypatch.setattr(BaselineProcess, "ask", listening)
    monkeypatch.setattr(bench_measure, "_KEPT", 2**62)  # as if the matrices were large
    path = mpi_tmp_path / "bench.jsonl"
    words = ["--sample", "2", "--methods", "auto,numpy", "--rounds", "3", "--repeat", "8", "--time-cap", "600"]
    collective_assert(comm, run(comm, path, *words) == 0)
    rows = results(comm, path)
    good = [len(row["samples_s"]) for row in rows] == [9] * 4 and all(row["passed"] for row in rows)
    collective_assert(comm, good, str(rows))
    cases = list(dict.fromkeys(case for case, _ in measured))
    there, back = ("auto", "numpy"), ("numpy", "auto")  # so that neither always comes after the other
    wanted = [(case, method) for case in cases for methods in (there, back, there) for method in methods]
    collective_assert(comm, measured == wanted and len(cases) == 2, str(measured))
    chosen = [setting for _, setting in asked]
    # One library on two problems, three rounds each; its process is asked by rank 0 alone.
    wanted = [None, chosen[:1], chosen[:1], None, chosen[3:4], chosen[3:4]]
    collective_assert(comm, [settings for settings, _ in asked] == (wanted if comm.rank == 0 else []), str(asked))
    collective_assert(comm, verified == [6, 12], f"verified after {verified} measurements")


def test_another_library_computes_the_same_products(comm, mpi_tmp_path):
    path = mpi_tmp_path / "bench.jsonl"
    words = ["--methods", "numpy,one", "--sample", "2", "--dtypes", "f32,f16"]
    collective_assert(comm, run(comm, path, *words) == 0)
    by_method = {}
    for row in results(comm, path):
        by_method.setdefault((row["method"], row["dtype"]), []).append(row)
    done, left_out = by_method["numpy", "f32"], by_method["numpy", "f16"]
    collective_assert(comm, len(done) == len(left_out) == 2, str(by_method))
    for row in done:
        good = (
            row["passed"] and row["compute"] == 1 and row["how"].endswith("BLAS threads") and len(row["samples_s"]) == 3
        )
        collective_assert(comm, good and row["scheduler"].startswith("NumPy") and row["settings"], str(row))
    collective_assert(comm, all("without a BLAS" in row["reason"] for row in left_out), str(left_out))
    collective_assert(comm, all(row["passed"] for row in by_method["one", "f16"]), "ours suffered")


def test_dealt_matrices_are_multiplied_beside_the_floor(comm, mpi_tmp_path, capfd):
    path = mpi_tmp_path / "bench.jsonl"
    words = [
        "--dataset",
        "layouts",
        "--methods",
        "auto,numpy,cublasmp,torch,floor",
        "--rounds",
        "2",
        "--scale",
        "0.006",
    ]
    collective_assert(comm, run(comm, path, *words, "--sample", "12", "--dtypes", "f32") == 0)
    rows = results(comm, path)
    of_method = {name: [row for row in rows if row["method"] == name] for name in words[3].split(",")}
    good = all(row["passed"] for row in of_method["auto"] + of_method["numpy"]) and len(of_method["auto"]) == 12
    collective_assert(comm, good, str(rows))
    # What comes of the floor is no result.
    good = all(row["passed"] is None and len(row["samples_s"]) == 4 for row in of_method["floor"])
    collective_assert(comm, good, str(of_method["floor"]))
    said = capfd.readouterr().out
    first = {row["place"]: row for row in of_method["auto"]}["rows,rows,rows"]
    cell = f"{1e3 * first['median_s']:.4g} ("
    collective_assert(comm, ("floor, ms" in said and cell in said) == (comm.rank == 0), said)
    reasons = {row["reason"] for row in of_method["torch"]}
    missing = "PyTorch is not installed" in str(reasons)
    good = missing or reasons == {"it multiplies matrices that lie in one memory each"}
    collective_assert(comm, good, str(reasons))


def test_problems_that_no_time_is_left_for_are_the_next_runs(comm, mpi_tmp_path, capfd):
    path = mpi_tmp_path / "bench.jsonl"
    words = ["--methods", "auto,one", "--sample", "3"]
    collective_assert(comm, run(comm, path, *words, "--time-limit", "0.000001") == 0)
    said = "6 results of 6 not begun within --time-limit: run the same command again" in capfd.readouterr().out
    collective_assert(comm, not path.exists() and said == (comm.rank == 0))
    collective_assert(comm, run(comm, path, *words, "--time-limit", "600") == 0)
    collective_assert(comm, "not begun" not in capfd.readouterr().out)
    collective_assert(comm, len(results(comm, path)) == 6)


def test_a_wrong_result_of_another_library_is_found(comm, mpi_tmp_path, monkeypatch, capfd):
    result = SharedTask.result

    def wrong(self):
        array = result(self)
        if not np.isnan(array).any():  # when it is read, not when it is poisoned
            array[3, 2] *= 1.5
        return array

    monkeypatch.setattr(SharedTask, "result", wrong)
    path = mpi_tmp_path / "bench.jsonl"
    collective_assert(comm, run(comm, path, "--methods", "numpy", "--sample", "1") == 1)
    collective_assert(comm, [row["passed"] for row in results(comm, path)] == [False])


def test_a_library_that_dies_is_left_out_and_started_again(comm, mpi_tmp_path, monkeypatch):
    ask, asked = BaselineProcess.ask, []

    def dying(self, message, *patience):
        asked.append(message["do"])
        if len(asked) == 2:
            self._process.kill()
        return ask(self, message, *patience)

    monkeypatch.setattr(BaselineProcess, "ask", dying)
    path = mpi_tmp_path / "bench.jsonl"
    collective_assert(comm, run(comm, path, "--methods", "numpy", "--sample", "2") == 0)
    first, second = results(comm, path)
    good = "the process of numpy ended with status -9" in first["reason"] and second["passed"]
    collective_assert(comm, good, f"{first}\n{second}")


def test_any_failure_of_rank_0_alone_is_told_to_all(comm, mpi_tmp_path, monkeypatch):
    def refuse(self, *arguments):
        raise DeviceError("no more files")

    monkeypatch.setattr(BaselineProcess, "__init__", refuse)
    path = mpi_tmp_path / "bench.jsonl"
    collective_assert(comm, run(comm, path, "--methods", "numpy,one", "--sample", "1") == 0)
    rows = results(comm, path)
    good = rows[0]["reason"] == "DeviceError: no more files" and rows[1]["passed"]
    collective_assert(comm, good, str(rows))


def test_what_cannot_be_had_here_is_left_out_and_the_others_go_on(comm, mpi_tmp_path, capfd):
    path = mpi_tmp_path / "bench.jsonl"
    words = ["--methods", "auto,cublasxt,cyclic:edp,cyclic:comm-opt", "--sample", "2"]
    collective_assert(comm, run(comm, path, *words) == 0)
    rows = {row["method"]: row for row in results(comm, path)}
    done = [row["method"] for row in rows.values() if row["passed"]]
    collective_assert(comm, done == ["auto", "cyclic:comm-opt"], str(rows))
    said = capfd.readouterr().out
    for wanted in (
        "left out: cublasxt, 2 problems: it is for the cuda backend, this is host",
        "left out: cyclic:edp, 2 problems: metric edp needs the devices' power, which is not known of this machine",
    ):
        collective_assert(comm, (wanted in said) == (comm.rank == 0), said)


def test_a_file_that_is_not_ours_is_left_as_it_is(comm, mpi_tmp_path, capfd):
    path = mpi_tmp_path / "notes.txt"
    for content in (b"precious data without newline", b'{"a": 1}', b"several\nlines"):
        once(comm, lambda content=content: path.write_bytes(content))
        collective_assert(comm, run(comm, path, "--sample", "1") == 2)
        said = capfd.readouterr().err
        collective_assert(comm, comm.rank or "line 1: not a result of this command" in said, said)
        collective_assert(comm, path.read_bytes() == content, path.read_bytes())
    folder = mpi_tmp_path / "folder"
    once(comm, folder.mkdir)
    collective_assert(comm, run(comm, folder, "--sample", "1") == 2)
    collective_assert(comm, run(comm, path, "--compute", str(comm.size + 1)) == 2)
    said = capfd.readouterr().err
    collective_assert(comm, comm.rank or f"--compute {comm.size + 1}: {there_are(comm.size, 'rank')}" in said, said)


def test_what_does_not_fit_is_left_out_and_said_and_tried_again(comm, mpi_tmp_path, machine_cache, monkeypatch, capfd):
    def too_large(*_: object, **__: object) -> None:
        raise agreed(CapacityError("rank 0 needs 5 bytes, 4 are there: use more ranks"))

    monkeypatch.setattr(bench_job, "make_product", too_large)
    path = mpi_tmp_path / "bench.jsonl"
    collective_assert(comm, run(comm, path, "--sample", "1", "--methods", "auto") == 0)
    rows = results(comm, path)
    collective_assert(comm, rows[0]["median_s"] is None and "needs 5 bytes" in rows[0]["reason"], str(rows))
    said = capfd.readouterr().out
    collective_assert(comm, comm.rank or "left out: f64" in said, said)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", machine_cache)
    collective_assert(comm, run(comm, path, "--sample", "1", "--methods", "auto") == 0)
    said = capfd.readouterr().out
    collective_assert(comm, comm.rank or "1 result, 0 of them wrong, 0 not verified, 0 left out" in said, said)


def test_bands_are_measured_with_a_transposed_and_the_others_without(comm, mpi_tmp_path, monkeypatch):
    monkeypatch.setattr(bench_job, "cases_of", lambda *_: [Case(96, 64, 80, "0,0,0")])
    path = mpi_tmp_path / "bench.jsonl"
    collective_assert(comm, run(comm, path, "--methods", "auto,bands:16,uncut") == 0)
    rows = {row["method"]: row for row in results(comm, path)}
    stored = {method: row["trans_a"] for method, row in rows.items()}
    collective_assert(comm, stored == {"auto": "N", "bands:16": "T", "uncut": "N"}, str(stored))
    collective_assert(comm, all(row["passed"] is True for row in rows.values()), str(rows))


def test_a_wrong_result_fails_the_run(comm, mpi_tmp_path, machine_cache, monkeypatch):
    right = bench_measure.verify_product

    def wrong(session, product, arguments):
        return dataclasses.replace(right(session, product, arguments), passed=False)

    monkeypatch.setattr(bench_measure, "verify_product", wrong)
    path = mpi_tmp_path / "bench.jsonl"
    collective_assert(comm, run(comm, path, "--sample", "1", "--methods", "uncut") == 1)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", machine_cache)
    collective_assert(comm, run(comm, path, "--sample", "1", "--methods", "uncut") == 0)  # measured again, and right
    collective_assert(comm, [row["passed"] for row in results(comm, path)] == [False, True])


def test_what_does_not_fit_is_multiplied_in_cubes_and_verified(comm, mpi_tmp_path):
    path = mpi_tmp_path / "cubes.jsonl"
    words = ["--only", "16384,host", "--methods", "auto,cubes", "--scale", "0.05"]
    words += ["--device-memory", f"{4096 // comm.size}KiB"]
    collective_assert(comm, run(comm, path, *words, "--dtypes", "f32,f16") == 0)
    rows = results(comm, path)
    found = {(row["dtype"], row["method"]): row for row in rows}
    good = found["f32", "cubes"]["passed"] and re.match(r"\d{2,} cubes of \d+, each grid", found["f32", "cubes"]["how"])
    good = good and found["f32", "cubes"]["scheduler"] == "cubes" and found["f32", "auto"]["passed"]
    good = good and "rounded each time" in found["f16", "cubes"]["reason"] and found["f16", "auto"]["passed"]
    collective_assert(comm, bool(good), str(rows))
