"""The loop of a baseline's process: begin a task, time it, hand its result back, until nobody asks any more."""

from __future__ import annotations

import json
import pkgutil
import statistics
import time
from collections.abc import Callable
from typing import Any, BinaryIO, Final

from uncut_mpi.bench.baselines.library import Library, LibraryProduct, Unsupported
from uncut_mpi.bench.baselines.task import Matrices, Task, words
from uncut_mpi.errors import named, reason

_LIBRARIES: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "numpy": ("numpy_blas:NumpyLibrary", ()),
    "scipy": ("numpy_blas:ScipyLibrary", ()),
    "pdgemm": ("scalapack:ScalapackLibrary", ()),
    "dtensor": ("torch_dtensor:DTensorLibrary", ("backend",)),
    "cublasmp": ("cublasmp:CublasMpLibrary", ()),
    "torch": ("torch_sharded:TorchLibrary", ("backend", "devices")),
    "jax": ("jax_sharded:JaxLibrary", ("backend", "devices")),
    "cublas": ("cublas:CublasLibrary", ("devices",)),
    "cublasxt": ("cublas:CublasXtLibrary", ("devices",)),
    "floor": ("cublas:FloorLibrary", ("devices",)),
}
"""Where the class of each library is, which is imported in its process alone, and what it is made of."""

_TRIES: Final = 3
"""Timed calls of every setting before one of them is chosen."""

_HOPELESS: Final = 1.5
"""A setting whose first timed call takes so many times as long as the best is not tried again."""


def load(name: str, backend: str, devices: int) -> Library:
    """
    Return a library by name.

    Raises
    ------
    Unsupported
        If it is not installed or does not reach the devices.
    """
    kind, wanted = _LIBRARIES["numpy" if (name, backend) == ("floor", "host") else name]
    given = {"backend": backend, "devices": devices}
    library: Library = pkgutil.resolve_name(f"uncut_mpi.bench.baselines.{kind}")(**{one: given[one] for one in wanted})
    return library


def serve(asked: BinaryIO, answers: BinaryIO, loading: Callable[[], Library]) -> None:
    """
    Answer one line after the other until there are no more.

    ``begin`` takes a task on and finds its best setting, among ``settings`` if there are any. ``time`` times calls with
    it. ``end`` computes once from the first C and stores the result. What the library cannot do is answered with
    ``error`` and ends the task; any other failure ends the loop too (``ends``).
    """
    server: _Server | None = None
    for line in asked:
        message = json.loads(line)
        try:
            server = server or _Server(loading())
            answer = server.answer(message)
        except Exception as error:  # whatever a foreign library raises: the ranks go on without it
            known = isinstance(error, Unsupported)
            answer = {"error": reason(error) if known else named(error), "ends": not known}
            if known and server is not None:
                try:
                    server.drop()
                except Exception as unfreed:  # said as well, and the end of the process frees it
                    answer = {"error": f"{reason(error)}; {named(unfreed)}", "ends": True}
        answers.write(words(answer))
        answers.flush()
        if answer.get("ends"):
            return  # what failed, as a device's context, may go on failing: the next task gets another process
    if server is not None:
        server.drop()


class _Server:
    def __init__(self, library: Library) -> None:
        self._library = library
        self._product: LibraryProduct | None = None
        self._setting = ""

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["do"] == "begin":
            self.drop()
            task = Task.from_json(message["task"])
            if not (self._library.takes_dealt if task.dealt else self._library.takes_whole and task.whole):
                kind = "are dealt to ranks" if self._library.takes_dealt else "lie in one memory each"
                raise Unsupported(f"it multiplies matrices that {kind}")
            self._product = self._library.open(task, Matrices.open(task))
            return {"library": self._library.version, **self._tune(self._product, message.get("settings"))}
        product = self._product
        if product is None:
            raise Unsupported("no task was begun")
        if message["do"] == "time":
            return {"samples_s": [self._timed(product, self._setting) for _ in range(message["count"])]}
        product.reset()
        product.prepare()
        product.call(self._setting)
        product.store()
        self.drop()
        return {}

    def drop(self) -> None:
        product, self._product = self._product, None
        if product is not None:
            product.close()

    def _tune(self, product: LibraryProduct, settings: list[str] | None) -> dict[str, Any]:
        """Call every setting, or those asked for, a few times and keep the one with the least median."""
        medians: dict[str, float] = {}
        failed: dict[str, str] = {}
        unsupported = True
        first_s = 0.0
        for setting in settings or product.settings:
            try:
                product.reset()
                began = self._timed(product, setting)  # compiles, allocates
                samples = [self._timed(product, setting)]
                while len(samples) < _TRIES and samples[0] <= _HOPELESS * min(medians.values(), default=samples[0]):
                    samples.append(self._timed(product, setting))
            except Exception as error:  # another setting may do, with less memory
                failed[setting] = reason(error)
                unsupported = unsupported and isinstance(error, Unsupported)
            else:
                medians[setting] = statistics.median(samples)
                first_s = first_s or began
        if not medians:
            text = "; ".join(f"{setting}: {text}" for setting, text in failed.items())
            raise Unsupported(text) if unsupported else RuntimeError(text)
        self._setting = min(medians, key=lambda setting: medians[setting])
        return {
            "setting": self._setting,
            "settings": {setting: round(seconds, 8) for setting, seconds in medians.items()},
            "failed": failed,
            "first_s": first_s,
            "call_s": medians[self._setting],
        }

    def _timed(self, product: LibraryProduct, setting: str) -> float:
        product.prepare()
        self._library.wait()
        start = time.perf_counter()
        product.call(setting)
        return self._library.slowest(time.perf_counter() - start)
