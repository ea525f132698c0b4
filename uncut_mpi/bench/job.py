"""The bench command: problems one after another, methods in turn, a line of JSON each. Collective."""

from __future__ import annotations

import datetime
import itertools
import json
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import uncut_mpi
from uncut_mpi.api.session import Session
from uncut_mpi.bench.arguments import BenchArguments, cases_of
from uncut_mpi.bench.measure import Entry, Facts, Measurer, combined
from uncut_mpi.bench.rates import draw_rates
from uncut_mpi.bench.summary import SINGLE, SUMMED, Row, summary_text
from uncut_mpi.command.artifacts import check_paths, write_file, written_by
from uncut_mpi.command.entry import Say
from uncut_mpi.command.product import Product, generated_sources, make_product, release_product
from uncut_mpi.command.progress import ProgressBar
from uncut_mpi.command.report import fields_of
from uncut_mpi.errors import CapacityError, DataFileError, ParamError, PlanError, agreed, reason
from uncut_mpi.model.arguments import counted, there_are
from uncut_mpi.regular import open_regular
from uncut_mpi.view.figure import import_figure

_SCALE: Final = {"cuda": 1.0, "host": 1 / 32}
_KEY: Final = ("m", "n", "k", "dtype", "place", "method", "compute")
_ASKED: Final = ("seed", "warmup", "repeat", "rounds", "time_cap_s", "tune_products", "device_memory", "check")
_BEGINNING: Final = b'{"m": '


def run_bench(comm: Any, arguments: BenchArguments, words: Sequence[str], say: Say) -> bool:
    """
    Measure what is missing in the file, sum up, and return whether no result in it is wrong. Collective.

    Raises
    ------
    UncutError
        The same on every rank.
    """
    too_many = [count for count in arguments.compute or () if count > comm.size]
    if too_many:
        raise agreed(ParamError(f"--compute {too_many[0]}: {there_are(comm.size, 'rank')}; start more or leave it out"))
    with Session(
        comm,
        **arguments.of_ranks,
        tune_products=arguments.tune_products,
        device_memory=arguments.device_memory,
    ) as session:
        with session.together("checking the output"):
            if session.rank == 0:
                check_paths(written_by(arguments))
                if arguments.plot is not None:
                    import_figure(", or leave --plot out")
        return _Bench(session, arguments, say).run()


class _Bench:
    def __init__(self, session: Session, arguments: BenchArguments, say: Say) -> None:
        self._session, self._arguments, self._say = session, arguments, say
        scale = arguments.scale or _SCALE[session.backend_name]
        self._cases = cases_of(arguments, session.size, scale)
        self._about = {
            "version": uncut_mpi.__version__,
            "backend": session.backend_name,
            "ranks": session.size,
            "machine": session.machine.key,
            "alpha": 1.2345,
            "beta": 1.1154,
            **fields_of(arguments, *_ASKED),
        }

    def run(self) -> bool:
        measurer = Measurer(self._session, self._arguments)
        try:
            return self._run(measurer)
        finally:
            measurer.close()

    def _run(self, measurer: Measurer) -> bool:
        session, arguments = self._session, self._arguments
        rows: list[Row] = []
        with session.together("reading earlier results"):
            if session.rank == 0:
                rows = self._read()
        rows = session.gather_values(rows)[0]
        # What was left out or wrong is tried again.
        done = {_key(row) for row in rows if row["median_s"] is not None and row["passed"] is not False}
        rows = [row for row in rows if _key(row) in done]
        todo = [one for one in self._work() if _work_key(one) not in done]
        bar = ProgressBar("measuring") if session.rank == 0 else None
        left = len(todo)
        for row in self._measured(measurer, todo, bar):
            rows.append(row)
            left -= 1
            with session.together("writing a result"):
                if session.rank == 0:
                    self._append(row)
        if bar is not None:
            number = arguments.rounds * len(todo)
            bar.show(number - arguments.rounds * left, number, "the time is over" if left else "done")
        with session.together("summing up"):
            if session.rank == 0:
                self._say(summary_text(rows, arguments.methods))
                if left:
                    missing = f"{counted(left, 'result')} of {len(todo)} not begun within --time-limit"
                    self._say(f"{missing}: run the same command again to go on\n")
                if arguments.plot is not None:
                    write_file("--plot", arguments.plot, draw_rates(rows, arguments.methods))
        return all(row["passed"] is not False for row in rows)

    def _measured(self, measurer: Measurer, todo: Sequence[Entry], bar: ProgressBar | None) -> Iterator[Row]:
        """
        Measure what is to do, all methods of a problem in so many rounds, and yield its rows.

        Every other round goes backwards, and the last one as they come: clocks rise while a slow method leaves devices
        idle, which the next one gains by.
        """
        rounds, number = self._arguments.rounds, 0
        began, limit_s = time.monotonic(), self._arguments.time_limit_s
        for _, grouped in itertools.groupby(todo, key=lambda one: (one.case, one.dtype, one.trans_a)):
            if limit_s is not None and self._session.gather_values(time.monotonic() - began)[0] > limit_s:
                return
            works = list(grouped)
            product: Product | None = None
            found: dict[Entry, list[Facts]] = {one: [] for one in works}
            turns = [(turn, one) for turn in range(rounds) for one in works[:: 1 if (rounds - turn) % 2 else -1]]
            for turn, one in turns:
                if bar is not None:
                    what = f"{one.dtype.name} {'×'.join(map(str, one.case[:3]))} at {one.case.placement}, {one.method}"
                    bar.show(number, rounds * len(todo), what)
                number += 1
                if not found[one] or "reason" not in found[one][-1]:
                    try:
                        product = product or self._make(one)
                        facts = measurer.measure(one, product, last=turn == rounds - 1)
                    except (CapacityError, PlanError) as error:
                        # On every rank; the next one may be smaller or elsewhere.
                        facts = {"reason": str(error)}
                    found[one].append(facts)
                if turn == rounds - 1:
                    yield self._row(one, combined(one, found[one]))
            if product is not None:
                measurer.forget()
                release_product(self._session, product)

    # -- what to do, and what is done --------------------------------------------------------

    def _work(self) -> Iterator[Entry]:
        counts = self._arguments.compute or (self._session.size,)
        for dtype in self._arguments.dtypes:
            for case in self._cases:
                works = [
                    Entry(case, dtype, method, count)
                    for method in self._arguments.methods
                    # One device is one, however many there are.
                    for count in ((1,) if method in SINGLE else counts)
                ]
                # What A is stored for comes together, so that it is made once each.
                yield from sorted(works, key=lambda one: one.trans_a)

    def _read(self) -> list[Row]:
        """
        Return the results in the file; a later one of the same measurement replaces an earlier one.

        A last line that was not finished is cut off, once the lines before it are found to be results.
        """
        path = self._arguments.output
        try:
            with os.fdopen(open_regular(path, os.O_RDWR), "r+b") as file:
                raw = file.read()
                complete = raw[: raw.rfind(b"\n") + 1]
                rows = [self._parse(number, line) for number, line in enumerate(complete.splitlines(), 1)]
                if len(complete) < len(raw):
                    if not rows and not raw.startswith(_BEGINNING):
                        raise DataFileError(f"--output {path}, line 1: not a result of this command")
                    file.truncate(len(complete))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise DataFileError(
                f"--output {path} is no file that results can be added to ({reason(error)}): name another"
            ) from None
        return list({_key(row): row for row in rows}.values())

    def _parse(self, number: int, line: bytes) -> Row:
        where = f"--output {self._arguments.output}, line {number}"
        try:
            row: Row = json.loads(line)
            found = {name: row[name] for name in (*_KEY, *self._about, *SUMMED)}
        except (ValueError, TypeError, KeyError, RecursionError):
            raise DataFileError(f"{where}: not a result of this command") from None
        other = [name for name in self._about if found[name] != self._about[name]]
        if other:
            raise DataFileError(
                f"{where}: {other[0]} was {found[other[0]]}, here it is {self._about[other[0]]}: results of another "
                "run cannot go on; remove it, or name another file (--output)"
            )
        return row

    def _append(self, row: Row) -> None:
        path = self._arguments.output
        try:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            with os.fdopen(open_regular(path, flags), "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise DataFileError(f"--output {path} cannot be written: {reason(error)}") from None

    # -- one measurement ---------------------------------------------------------------------

    def _make(self, one: Entry) -> Product:
        m, n, k, _ = one.case
        arguments = one.gemm_arguments(self._arguments.seed, self._session.size)
        return make_product(self._session, arguments, (m, n, k), one.dtype, generated_sources(arguments, m, n, k), "F")

    def _row(self, one: Entry, facts: Facts) -> dict[str, Any]:
        empty = dict.fromkeys(("tflop_per_s", "passed", "error", "tolerance", "joules"))
        return {
            **dict(zip(_KEY, _work_key(one), strict=True)),
            **empty,
            "trans_a": one.trans_a,
            "limited_by": "",
            "reason": "",
            **facts,
            **self._about,
            "device": self._session.device_names[0],
            "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        }


def _work_key(one: Entry) -> tuple[Any, ...]:
    return (*one.case[:3], one.dtype.name, one.case.placement, one.method, one.compute)


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in _KEY)
