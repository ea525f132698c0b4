"""What is tried first and is not there: in one sentence what to do today instead."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

BATCH: Final = (
    "session.gemm multiplies batches, which session.register, distribute and empty make of three dimensions, and "
    "session.gemm_batch lists of matrices"
)
_DIMENSIONS = {0: "a number is x.reshape(1, 1)", 1: "a vector is a matrix of one column, x.reshape(-1, 1)"}
_ASYNCHRONOUS = "session.gemm and plan.execute return at once with wait=False, and what they return has wait()"
_GEMM = (
    "open a session (with uncut_mpi.Session(comm) as session) and call session.gemm; uncut_mpi.blas has SciPy's names"
)
_TRIANGLES = (
    "session.syrk(a, c) and session.syr2k(a, b, c) write one triangle, of a Hermitian C session.herk(a, c) and "
    "session.her2k(a, b, c), and so does session.gemm(a, b.T, c, triangle='lower')"
)
_READ = (
    "session.symm(a, b, c) and session.hemm(a, b, c) read one triangle of A, and so do session.trmm(a, b) and "
    "session.trsm(a, b), which overwrite B"
)
_EPILOGUE = "a product has alpha and beta, and no epilogue: apply it to matrix.local afterwards"

_INSTEAD: Final = {
    **dict.fromkeys(("wait", "blocking", "asynchronous", "async_op", "igemm", "gemm_async"), _ASYNCHRONOUS),
    **dict.fromkeys(("batch", "batched", "bmm", "einsum", "batched_gemm", "gemm_batched"), BATCH),
    **dict.fromkeys(("epilogue", "epilog", "bias", "activation"), _EPILOGUE),
    **dict.fromkeys(("gemm", "multiply", "mm"), _GEMM),
    **dict.fromkeys(("syrk", "syr2k", "herk", "her2k", "gemmt"), _TRIANGLES),
    **dict.fromkeys(("symm", "hemm", "trmm", "trsm"), _READ),
    **dict.fromkeys(("gemv", "dot"), "there are products of two matrices alone; a vector is one of one column"),
}
_ALIASES = {"c": "out", "out": "c", "multiply": "gemm", "mm": "gemm"}


def dimensions_text(number: int) -> str:
    """Return how many dimensions an array has instead of two, and what to do."""
    mend = _DIMENSIONS.get(number, BATCH)
    return f"{number} dimension{'s' if number != 1 else ''}, a matrix has two: {mend}"


def no_attribute(owner: str, name: str, known: Sequence[str]) -> AttributeError:
    """Return the error of an attribute that is not there, which proposes one of those that are."""
    mend = "" if name.startswith("_") or name in known else _mend(name, known)
    return AttributeError(f"{owner} has no attribute {name!r}{mend}", name=name, obj=None)  # else Python proposes, too


def absent(self: object, name: str) -> Any:
    """Stand in for `__getattr__`."""
    kind = type(self)
    raise no_attribute(f"a {kind.__name__}", name, [known for known in dir(kind) if not known.startswith("_")])


def bad_call(method: Callable[..., Any], named: Iterable[str], error: BaseException | None = None) -> str:
    """Return what to say of a call with other arguments than there are; empty for an error that it raised itself."""
    begun = error is not None and (error.__traceback__ is None or error.__traceback__.tb_next is not None)
    if begun or not isinstance(error, TypeError | None):
        return ""
    every = inspect.signature(method).parameters.values()
    taken = {one.name: one for one in every if one.name not in ("self", "cls") and one.kind is not one.VAR_KEYWORD}
    call = method.__qualname__.removesuffix(".__init__").rpartition(".")[2]
    unknown = next((name for name in named if name not in taken), None)
    if unknown is not None:
        return f"{call}() has no argument {unknown!r}{_mend(unknown, [*taken])} (it takes {', '.join(taken)})"
    if str(error).endswith(" given"):
        by_position = ", ".join(name for name, about in taken.items() if about.kind is not about.KEYWORD_ONLY)
        takes = f"only {by_position}" if by_position else "nothing"
        return f"{call}() takes {takes} by position: name the others, and pass several values as one sequence"
    said = str(error).replace(f"{method.__qualname__}()", f"{call}()")
    if "comm" in taken and "'comm'" not in said:
        said += ": the communicator comes first; session.gemm(a, b) multiplies matrices of a session"
    return said


def _mend(name: str, known: Sequence[str] = ()) -> str:
    plain = name.lower()
    alias = _ALIASES.get(plain)
    if alias in known:
        return f": did you mean {alias!r}?"
    starts = (n for n in range(3) if plain[n:] in _INSTEAD and not plain[:n].strip("psdczh"))  # as "pd" of pdgemm
    plain = plain[next(starts, 0) :]
    if plain in _INSTEAD:
        return f": {_INSTEAD[plain]}"
    close = difflib.get_close_matches(plain, known, 1)
    return f": did you mean {close[0]!r}?" if close else ""
