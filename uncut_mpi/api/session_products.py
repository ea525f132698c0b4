"""The calls of a session that multiply, at once or planned for many executions, and those that copy matrices."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, TypeVar, cast

import numpy as np

from uncut_mpi.api.batch import Batch
from uncut_mpi.api.bound_epilogue import BoundEpilogue
from uncut_mpi.api.call import Call
from uncut_mpi.api.flight import Handle, call_without_waiting
from uncut_mpi.api.gate import public_call
from uncut_mpi.api.gemm_plan import GemmPlan
from uncut_mpi.api.keys import PlanKey
from uncut_mpi.api.matrix import Matrix
from uncut_mpi.api.operands import Listed, in_one, operand_of
from uncut_mpi.api.plans import AnyPlan
from uncut_mpi.api.request import Choices, Request, Scalars, check_copy, infos_of
from uncut_mpi.api.session_matrices import MakesMatrices
from uncut_mpi.api.typed import overload
from uncut_mpi.api.wanted import (
    NewMatrix,
    layout_of,
    new_batch,
    new_results,
    out_layout_of,
    own_memory,
    rank_of,
)
from uncut_mpi.api.wording import product_asked
from uncut_mpi.errors import ParamError, raised_by_all
from uncut_mpi.model.arguments import Number, flag
from uncut_mpi.model.epilogue import Activation
from uncut_mpi.model.form import PLAIN, Forms
from uncut_mpi.model.layout import Layout
from uncut_mpi.model.locations import Location, Memory, memory_of
from uncut_mpi.model.part_of_c import Triangle
from uncut_mpi.model.positions import indices_of, picked
from uncut_mpi.model.problem import Trans
from uncut_mpi.planning.options import ScheduleOptions
from uncut_mpi.spmd import agreement

if TYPE_CHECKING:
    from typing_extensions import Unpack

_One: TypeAlias = Matrix | Batch
_Many: TypeAlias = Sequence[Matrix] | _One
_M = TypeVar("_M", Matrix, Batch)
_Any = TypeVar("_Any", bound=_One)
_Ms = TypeVar("_Ms", bound=Sequence[Matrix] | Batch)


class _By(TypedDict, total=False):
    alpha: Number
    beta: Number
    trans_a: Trans
    trans_b: Trans
    scale_a: float | None
    scale_b: float | None
    options: ScheduleOptions | None
    stream: Any


class _To(_By, total=False):
    triangle: Triangle
    activation: Activation
    scale: Matrix | None
    bias: Matrix | None
    residual: Matrix | None
    out_layout: Layout | Literal["auto"] | None


class Multiplies(MakesMatrices):
    """The products of a session, and copies: to another layout, from one rank or to one, to the host and back."""

    @overload
    def gemm(self, a: Matrix, b: _M, out: _M | None = ..., *, wait: Literal[True] = ..., **by: Unpack[_To]) -> _M: ...
    @overload
    def gemm(
        self, a: Batch, b: _One, out: Batch | None = ..., *, wait: Literal[True] = ..., **by: Unpack[_To]
    ) -> Batch: ...
    @overload
    def gemm(
        self, a: Matrix, b: _M, out: _M | None = ..., *, wait: Literal[False], **by: Unpack[_To]
    ) -> Handle[_M]: ...
    @overload
    def gemm(
        self, a: Batch, b: _One, out: Batch | None = ..., *, wait: Literal[False], **by: Unpack[_To]
    ) -> Handle[Batch]: ...
    @overload
    def gemm(self, a: _One, b: _One, out: _One | None = ..., *, wait: bool, **by: Unpack[_To]) -> Any: ...
    @public_call
    def gemm(
        self,
        a: Any,
        b: Any,
        out: Any = None,
        *,
        alpha: Number = 1.0,
        beta: Number = 0.0,
        trans_a: Trans = "N",
        trans_b: Trans = "N",
        triangle: Triangle = "",
        activation: Activation = "",
        scale: Matrix | None = None,
        bias: Matrix | None = None,
        residual: Matrix | None = None,
        scale_a: float | None = None,
        scale_b: float | None = None,
        options: ScheduleOptions | None = None,
        out_layout: Layout | Literal["auto"] | None = None,
        stream: Any = None,
        wait: bool = True,
    ) -> Any:
        """
        Compute C := alpha op(A) op(B) + beta C, or f(scale alpha op(A) op(B) + bias + beta C). Collective.

        Parameters
        ----------
        a, b : Matrix or Batch
            op(A) is m×k, op(B) is k×n; same dtype, or e4m3 and e5m2. Batches are multiplied as ``numpy.matmul`` does:
            matrix by matrix, where one of them may be a Matrix, or a batch of one, which is for all matrices of the
            other.
        out : Matrix, optional
            C, m×n, overwritten. By default a new one in C order. Of two whole matrices (`register`, `empty_host`,
            `empty_device`, ``Layout.whole()``) it is a host matrix of all ranks (`empty_host`). Else it is dealt as
            op(A) if that leaves k whole, or as op(B) if that does, or by even rows. It lies in memory of the same kind
            as the operand that it follows, or A. Of batches it is one, dealt as the first of them that has as many
            matrices, or a host batch of all ranks if both operands are whole. Of dtype f32 for bf16 and f16 too, which
            rounds no sum; of e4m3 and e5m2 f32 (a new one), bf16 or f16; of i8 always i32.
        alpha, beta : float or complex
            Scalars, complex of complex matrices alone, whole numbers of i8. With beta = 0 C is not read, with alpha = 0
            A and B are not.
        trans_a, trans_b : {"N", "T", "C"}
            Whether op transposes, or transposes and conjugates.
        triangle : {"", "lower", "upper", "lower_real", "upper_real"}
            Of a square C: alone this triangle, with the diagonal, is computed and written. Elements beyond it stay as
            they were, and are 0 in a new C. Of a large C it takes little more than half the operations (`syrk`). With
            ``_real`` C is Hermitian: its diagonal is written without imaginary parts (`herk`).
        activation : {"", "relu", "gelu"}
            f, done once to each element when all is summed and before it is rounded to C's type. ``"gelu"`` is the form
            with tanh, as of cuBLASLt. This and the next three are for one product of real types.
        scale, bias : Matrix, optional
            Of the type of C. 1×n: a factor and an addend for each column of C; m×1: for each row. All ranks have all of
            it on their devices: ``session.distribute(vector[None], Layout.replicated())``.
        residual : Matrix, optional
            Of the shape and type of C, added instead of beta C. It is copied into C first, if it is not C itself.
        scale_a, scale_b : float
            Of e4m3 and e5m2 alone, which have to have them: A and B stand for scale_a A and scale_b B.
        options : ScheduleOptions, optional
            What to fix about the schedule.
        out_layout : Layout or "auto", optional
            How a new C is dealt, also of two whole matrices, instead of by that rule; its memory is as by the rule for
            others. ``"auto"``: as op(A), as op(B), by even rows, columns or blocks, whichever is predicted to take the
            least time; of batches as A, as B, or evenly. The first such call plans for each of them by rule, unless
            `options` say how far to search.
        stream : optional
            Stream whose earlier work must be done first; the current one by default.
        wait : bool, default True
            False: return when the product is on its way, with a `Handle` for its end. The same on all ranks. What has
            to be made first (a new C, a plan) is made meanwhile, when earlier products have ended.

        Returns
        -------
        Matrix, Batch or Handle
            C, or what waits for it.

        Raises
        ------
        ParamError
            If arguments do not fit or differ between ranks, or beta is not 0 and there is no C. Also if C overlaps A, B
            or a vector in memory, as far as that can be known (see `register`), or a matrix of a batch another. Nothing
            was computed.
        CapacityError
            If a device has too little memory for the SoftBuf.
        UncutError
            If a rank failed while computing; C is undefined then.
        """
        if out is None:
            scales, vectors = (scale_a, scale_b), (activation, scale, bias)
            chosen = trans_a, trans_b, options, triangle
            out = self._make_result("gemm", (a, b), (alpha, beta), scales, chosen, vectors, out_layout)
            out_layout = None
            if triangle:
                zeros: dict[str, Any] = {"trans_a": trans_a, "trans_b": trans_b, "scale_a": scale_a, "scale_b": scale_b}
                self.gemm(a, b, out, alpha=0.0, **zeros)
        call = "gemm"
        with self._gate.exclusive():
            try:
                self._backend.mark_caller(stream)  # first: the device comes to it meanwhile
                if wait is not True:
                    call = call_without_waiting(call, wait)
                if out_layout is not None:
                    raise ParamError("out and out_layout were given: pass out, which has a layout, or out_layout")
                scalars, epilogue = Scalars.of(alpha, beta), None
                if scale is not None or bias is not None or activation != "":
                    epilogue = BoundEpilogue.of(self._store.check_vector, activation, scale, bias)
                if residual is not None:
                    if scalars.beta:
                        raise ParamError(f"residual and beta = {scalars.beta} were given: pass one; it has beta 1")
                    scalars = scalars._replace(beta=1.0)
                choices = Choices.of(trans_a, trans_b, options, triangle, epilogue)
                matrices = self._store.operands(a, b, out, choices)
                scalars = scalars.scaled(matrices[0].info.dtype, scale_a, scale_b)
                request = tuple.__new__(Request, (call, matrices, scalars, choices, None))  # as in `Scalars.of`
                plan = self._calls.plans.find(request)
                copy = None
                if residual is not None and residual is not matrices[2]:
                    source = self._store.check("residual", residual)
                    check_copy(("residual", source.info), ("out", matrices[2].info))
                    copy = self._copying("gemm: residual", source, matrices[2])
            except Exception as error:
                self._gate.fail(call, error)
            if copy is not None:
                self._calls.run(*copy, self._calls.plans.keep)
            if wait:
                self._calls.run(request, plan, self._calls.plans.keep)
                return out
            begun = self._calls.launch(request, plan, self._calls.plans.keep)
            return Handle(self, self._calls.flight, begun, lambda call: out)

    @overload
    def gemm_batch(self, a: _Many, b: _Many, out: _Ms, *, wait: Literal[True] = ..., **by: Unpack[_By]) -> _Ms: ...
    @overload
    def gemm_batch(self, a: _Many, b: _Many, out: _Ms, *, wait: Literal[False], **by: Unpack[_By]) -> Handle[_Ms]: ...
    @overload
    def gemm_batch(self, a: _Many, b: _Many, out: _Ms, *, wait: bool, **by: Unpack[_By]) -> _Ms | Handle[_Ms]: ...
    @public_call
    def gemm_batch(
        self,
        a: Sequence[Matrix] | Batch | Matrix,
        b: Sequence[Matrix] | Batch | Matrix,
        out: Sequence[Matrix] | Batch,
        *,
        alpha: Number = 1.0,
        beta: Number = 0.0,
        trans_a: Trans = "N",
        trans_b: Trans = "N",
        scale_a: float | None = None,
        scale_b: float | None = None,
        options: ScheduleOptions | None = None,
        stream: Any = None,
        wait: bool = True,
    ) -> Any:
        """
        Compute out[i] := alpha op(a[i]) op(b[i]) + beta out[i] for each i, as one product. Collective.

        Parameters
        ----------
        a, b : sequence of Matrix, or Batch
            Of equal or different shapes, wherever each lies, views too. One Matrix, or one of one, is for all of them.
        out : sequence of Matrix, or Batch
            As many as there are products.
        alpha, beta, trans_a, trans_b, scale_a, scale_b, options, stream, wait
            As of `gemm`, for all products alike.

        Returns
        -------
        sequence of Matrix, Batch or Handle
            `out`, or what waits for it.

        Raises
        ------
        ParamError, CapacityError, UncutError
            As `gemm`; if numbers or shapes do not fit, types differ, or a result overlaps another one.
        """
        given = [
            Listed(one) if isinstance(one, list | tuple) else one for one in (a, b, [None] if out is None else out)
        ]
        chosen, scales = (trans_a, trans_b, options), (scale_a, scale_b)
        begun = self._product("gemm_batch", given, (alpha, beta), chosen, scales=scales, stream=stream, wait=wait)
        return out if begun is None else Handle(self, self._calls.flight, begun, lambda call: out)

    @overload
    def matmul(self, a: Matrix, b: _M) -> _M: ...
    @overload
    def matmul(self, a: Batch, b: _One) -> Batch: ...
    @public_call
    def matmul(self, a: Matrix | Batch, b: Matrix | Batch) -> Any:
        """Return A B, a new matrix or batch: `gemm` without anything else. Collective."""
        factors, chosen = (1.0, 0.0), ("N", "N", None)
        out = self._make_result("matmul", (a, b), factors, (None, None), (*chosen, ""), ("", None, None), None)
        self._product("matmul", (a, b, out), factors, chosen)
        return out

    def _product(
        self,
        call: str,
        given: Sequence[Any],
        factors: tuple[object, object],
        chosen: tuple[Any, ...],
        *,
        forms: Forms = PLAIN,
        told: Mapping[str, object] | None = None,
        scales: tuple[object, object] = (None, None),
        stream: Any = None,
        wait: object = True,
    ) -> Call | None:
        """
        Multiply for another call than `gemm`, as that does; return a product that is begun and not over. Collective.

        What is chosen are arguments of `Choices.of`. ``wait=None`` begins it, and the name of the call does not say so.
        """
        with self._gate.exclusive():
            try:
                self._backend.mark_caller(stream)
                call = call if wait is None else call_without_waiting(call, wait)
                choices = Choices.of(*chosen)._replace(forms=forms)
                matrices = self._store.operands(given[0], given[1], given[2], choices)
                scalars = Scalars.of(*factors).scaled(matrices[0].info.dtype, *scales)
                request = Request(call, matrices, scalars, choices, told)
                plan = self._calls.plans.find(request)
            except Exception as error:
                self._gate.fail(call, error)
            if wait:
                self._calls.run(request, plan, self._calls.plans.keep)
                return None
            return self._calls.launch(request, plan, self._calls.plans.keep)

    @public_call
    def plan(
        self,
        a: Matrix | Batch,
        b: Matrix | Batch,
        c: Matrix | Batch,
        *,
        reads_c: bool = True,
        trans_a: Trans = "N",
        trans_b: Trans = "N",
        triangle: Triangle = "",
        activation: Activation = "",
        scale: Matrix | None = None,
        bias: Matrix | None = None,
        scales_only: bool = False,
        options: ScheduleOptions | None = None,
    ) -> GemmPlan:
        """
        Plan C := alpha op(A) op(B) + beta C once, for many executions. Collective.

        Parameters
        ----------
        a, b, c : Matrix or Batch
            As for `gemm`; others of the same shape, type, order, leading dimension and location
            may be given to `GemmPlan.execute`.
        reads_c : bool, default True
            False promises beta = 0 in every execution, and saves reading C.
        triangle, activation, scale, bias
            As for `gemm`; the vectors are those of every execution, with what they hold then.
        scales_only : bool, default False
            True promises alpha = 0 in every execution, and saves A and B: C is only scaled.

        Raises
        ------
        ParamError, PlanError, CapacityError
            On all ranks.
        """
        with self._gate.call("plan") as open_with:
            epilogue = BoundEpilogue.of(self._store.check_vector, activation, scale, bias)
            choices = Choices.of(trans_a, trans_b, options, triangle, epilogue)
            operands = self._store.operands(a, b, c, choices)
            promises = {"reads_c": flag("reads_c", reads_c), "scales_only": flag("scales_only", scales_only)}
            key = PlanKey.of(infos_of(operands), choices, **promises)
            open_with(**product_asked("plan", operands, choices.asked(), promises))
            plan, _ = self._calls.prepare(key.searched(choices.options.search or "full"), operands, choices)
        return GemmPlan(self, self._calls, plan, operands, choices, (a, b, c))

    def _make_result(
        self,
        call: str,
        given: tuple[Any, Any],
        factors: tuple[object, object],
        scales: tuple[object, object],
        chosen: tuple[object, object, object, object],
        vectors: tuple[object, object, object],
        layout: object,
    ) -> Matrix | Batch:
        """Return a new matrix, or batch, for op(A) op(B). Collective."""
        with self._gate.call(call) as open_with:
            scalars, epilogue = Scalars.of(*factors), BoundEpilogue.of(self._store.check_vector, *vectors)
            choices = Choices.of(*chosen, epilogue)
            if scalars.beta != 0:
                raise ParamError(f"beta = {scalars.beta}, but there is no C: pass out=, or beta=0")
            wanted = out_layout_of(layout)
            first, second = (self._store.check_any(name, one) for name, one in zip("AB", given, strict=True))
            scalars = scalars.scaled(first.dtype, *scales)
            several = new_results(first, second, *choices[:2], wanted, self.size)
            several = [self._apart(new) for new in several]
            for new in several:
                new.layout.rectangles(new.shape, self.size)
            seen = tuple(operand_of(one, "diagonal") if isinstance(one, Batch) else one for one in (first, second))
            about = scalars._asdict(), choices.asked(), {"out_layout": wanted}
            open_with(**product_asked(call, seen, *about))
            if len(several) > 1:
                new = self._fastest_result((first, second), several, scalars, choices)
            return self._made_of(new, first, second)

    def _made_of(self, new: NewMatrix, *given: Matrix | Batch) -> Matrix | Batch:
        """Return a new matrix, or batch, of the library that the first of these is of which is not of numpy's."""
        made = self._store.empty(new)
        whole, *others = ((one.base if isinstance(one, Batch) else one).whole for one in (made, *given))
        whole.library = next((one.library for one in others if one.library), "")
        return made

    def _apart(self, new: NewMatrix) -> NewMatrix:
        """Return a new matrix that nobody said where to make: in each rank's own memory where none is of all ranks."""
        deals = new.memory == "shared" and new.layout != Layout.whole() and self._group.num_nodes > 1
        return dataclasses.replace(new, memory="host") if deals else new

    def _fastest_result(
        self, given: tuple[Any, Any], several: Sequence[NewMatrix], scalars: Scalars, choices: Choices
    ) -> NewMatrix:
        """Return the matrix for op(A) op(B) whose product is predicted to take the least time. Collective."""
        memories = zip(*self._group.allgather_objects([one.memory for one in several]), strict=True)
        promises = {"reads_c": False, "scales_only": scalars.alpha == 0}
        with raised_by_all():
            results = itertools.starmap(self._store.proposed, zip(several, memories, strict=True))
            operands = (self._store.operands(*given, one, choices) for one in results)
            keys = [PlanKey.of(infos_of(of_product), choices, **promises) for of_product in operands]
        return several[self._calls.maker.fastest(keys, self._calls.binder.held_bytes)]

    # -- copies ------------------------------------------------------------------------------

    @public_call
    def scatter(self, array: Any, layout: Layout, root: int = 0, *, memory: Memory = "device") -> Any:
        """
        Return a new matrix, or batch, with the elements of an array of one rank, dealt to ranks. Collective.

        Parameters
        ----------
        array : array on rank `root`; ignored elsewhere (pass None)
            As of `register`.
        layout : Layout
            What each rank is to have; of a batch as of `empty`.
        root : int, default 0
            The rank that has the array.
        memory : {"device", "host", "shared"}
            As of `empty`.

        Raises
        ------
        ParamError, CapacityError
            As `register` and `empty`.
        """
        with self._gate.call("scatter") as open_with:
            place, wanted, where = rank_of("root", root, self.size), layout_of(layout), memory_of(memory)
            wanted.check_memory(where)
            open_with(root=place, layout=wanted, memory=where)
            source = self._store.register(array, place, None)
            with raised_by_all():
                new = _like(source, wanted, where, self.size)
            made = self._made_of(new, source)
            self._copy("scatter", in_one(source), in_one(made))
            self._store.release(source.base if isinstance(source, Batch) else source)
        return made

    @public_call
    def gather(self, matrix: Matrix | Batch, root: int = 0) -> np.ndarray | None:
        """
        Return all of a matrix, or batch, as a new numpy array on one rank, None elsewhere. Collective.

        Parameters
        ----------
        matrix : Matrix or Batch
            Of any layout.
        root : int, default 0
            The rank that gets the array.

        Raises
        ------
        ParamError, CapacityError
            If the arguments are none of these, or the rank has too little memory.
        """
        with self._gate.call("gather") as open_with:
            given, place = self._store.check_any("matrix", matrix), rank_of("root", root, self.size)
            source = in_one(given)
            open_with(matrix=source.info, root=place)
            made = self._store.empty(_like(given, Layout.whole(place), "host", self.size))
            self._copy("gather", source, target := in_one(made))
            array: np.ndarray | None = made.array if self.rank == place else None
            self._store.release(target.whole)
        return array

    @public_call
    def redistribute(
        self, matrix: _Any, layout: Layout | None, *, out: _Any | None = None, memory: Memory | None = None
    ) -> _Any:
        """
        Copy a matrix, or batch, into one that is dealt otherwise. Collective.

        Parameters
        ----------
        matrix : Matrix or Batch
            Of any layout.
        layout : Layout or None
            What each rank is to have; with `out` None stands for its layout, also where that has no name.
        out : Matrix or Batch, optional
            Where it is copied to: one of this layout, and of the same shape and type. By default a new one. Parts
            that are stored in another order are transposed on their way.
        memory : str, optional
            Of a new one, as of `empty`; by default each rank's is that of its part of `matrix`.

        Returns
        -------
        Matrix or Batch
            `out`, or the new one.

        Raises
        ------
        ParamError, CapacityError
            If arguments do not fit, or a rank has too little memory.
        """
        with self._gate.call("redistribute") as open_with:
            given = self._store.check_any("matrix", matrix)
            source, made, result = in_one(given), None, cast(Any, out)
            target, where = None, None
            wanted = None if layout is None and out is not None else layout_of(layout)
            if wanted is not None:
                made = _like(given, wanted, "host", self.size)
                made.layout.rectangles(made.shape, self.size)
            if out is None:
                where = None if memory is None else memory_of(memory)
                if wanted is not None and where is not None:
                    wanted.check_memory(where)
            else:
                target = _fitting(given, self._store.check_any("out", out))
                extents = (len(given), 1) if isinstance(given, Batch) else source.shape
                fits = wanted is None or result.layout == wanted.filled(extents, self.size)
                if memory is not None or not fits:
                    raise ParamError(
                        f"out is of layout {result.layout}, but layout {wanted} and memory {memory} were given: "
                        "pass the layout of out, or None, and no memory, or no out"
                    )
                check_copy(("matrix", source.info), ("out", target.info))
            told = None if target is None else target.info
            open_with(matrix=source.info, layout=wanted, out=told, memory=where)
            if target is None:
                assert made is not None  # without a layout there is an out
                new = dataclasses.replace(made, memory=where or own_memory(source, made.layout))
                new = new if where else self._apart(new)
                target = in_one(result := self._made_of(new, given))
            self._copy("redistribute", source, target)
        return cast(_Any, result)

    @public_call
    def download(self, matrix: _Any) -> _Any:
        """
        Return a host matrix that every rank reads with the elements of a matrix, or such a batch of one. Collective.

        Parameters
        ----------
        matrix : Matrix or Batch
            Of any location; one in shared host memory is returned as it is.
        """
        with self._gate.call("download") as open_with:
            self._store.check_any("matrix", matrix)
            found = in_one(matrix)
            found.info.check_in_memory()
            self._await_caller(found)
            open_with(matrix=found.info)
            if found.whole.location == Location.host():  # of one in parts not all ranks have the array
                return matrix
            copy = self._made_of(_like(matrix, Layout.whole(0), "shared", self.size), matrix)
            if self._group.num_nodes > 1:  # ranks do not reach what is another node's
                self._copy("download", found, in_one(copy))
                return cast(_Any, copy)
            with agreement.collective(self._group, "downloading a matrix"):
                self._move(found, np.asarray(in_one(copy)), writes=False)
        return cast(_Any, copy)

    @public_call
    def upload(self, source: Matrix | Batch, target: Matrix | Batch) -> None:
        """
        Copy a shared host matrix, or batch, into one of the same shape and type. Collective.

        Raises
        ------
        ParamError
            If shapes or types differ, `source` is not in shared host memory, or `target` cannot be written, overlaps it
            in memory or overlaps itself.
        """
        with self._gate.call("upload") as open_with:
            given = [self._store.check_any(name, one) for name, one in (("source", source), ("target", target))]
            source, target = in_one(given[0]), _fitting(*given)
            check_copy(("source", source.info), ("target", target.info))
            if source.whole.location != Location.host():
                raise ParamError(f"source ({source}) is not in shared host memory: use empty_host")
            self._await_caller(source, target)
            open_with(source=source.info, target=target.info)
            if self._group.num_nodes > 1:
                self._copy("upload", source, target)
                return
            if target.info.file:
                self._store.begin_writing(target.info)
            with agreement.collective(self._group, "uploading a matrix"):
                self._move(target, np.asarray(source), writes=True)
            if target.info.file:
                self._store.end_writing(target.info)

    def _await_caller(self, *matrices: Matrix) -> None:
        """Wait for what the caller's stream does, before matrices are moved without a plan, as with one. Local."""
        self._backend.mark_caller(None)
        self._backend.await_caller()
        self._store.check_files(matrices)

    def _move(self, matrix: Matrix, every: np.ndarray, *, writes: bool) -> None:
        """Copy this rank's parts of a matrix into an array of all elements, or from it. Local."""
        info, backend, item = matrix.info, self._backend, every.itemsize
        for at, held in enumerate(info.parts):
            part, own = held.part, matrix.own_part(at)
            if own is None or held.holder != self.rank or 0 in part.shape:
                continue
            address, array = own
            there = picked(*indices_of((part.rows, part.cols), info.layout.orders))
            if part.location.space == "host" and not info.file:
                if writes:
                    array[...] = every[there]
                else:
                    every[there] = array
                continue
            block = every[there]
            lines = block if part.order == "F" else block.T
            in_place = isinstance(there[0], slice) and lines.strides[0] == item
            if not in_place:
                lines = np.asfortranarray(lines) if writes else np.empty_like(lines, order="F")
            if info.file:
                ends = (address, part.ld * item), (lines.ctypes.data, lines.strides[1])
                (to, to_pitch), (source, pitch) = ends if writes else ends[::-1]
                backend.files.copy(to, to_pitch, source, pitch, (lines.shape[0] * item, lines.shape[1]))
            elif writes:
                backend.from_host(address, part.ld, lines)
            else:
                backend.to_host(address, part.ld, lines)
            if not (writes or in_place):
                every[there] = lines if part.order == "F" else lines.T

    def _copy(self, call: str, source: Matrix, target: Matrix) -> None:
        """Copy a matrix into another, as part of a call that has opened. Collective."""
        try:
            self._backend.mark_caller(None)
            request, plan = self._copying(call, source, target)
        except Exception as error:
            self._gate.fail(call, error)
        self._calls.run(request, plan, self._calls.plans.keep)

    def _copying(self, call: str, source: Matrix, target: Matrix) -> tuple[Request, AnyPlan | PlanKey]:
        """Return the copy of a matrix into another, and its plan or the key of one. Local."""
        request = Request(call, (source, source, target), Scalars(1.0, 0.0), Choices.of("N", "N", None))
        return request, self._calls.plans.known(PlanKey.of_copy(infos_of(request.matrices), request.choices))


def _like(one: Matrix | Batch, layout: Layout, memory: Memory, size: int) -> NewMatrix:
    """Return what is to be made of the shape, type and order of another one."""
    if isinstance(one, Batch):
        return new_batch(one.shape, one.dtype, one.order, layout, memory, size)
    return NewMatrix(one.shape, one.dtype, one.order, layout, memory)


def _fitting(source: Matrix | Batch, target: Matrix | Batch) -> Matrix:
    """Return a matrix, or a batch as one matrix, into which another is to be copied; ParamError for other shapes."""
    if Batch in (type(source), type(target)) and source.shape != target.shape:
        found, wanted = ("×".join(map(str, one.shape)) for one in (target, source))
        raise ParamError(f"a batch is copied into one of its shape, {wanted}: {found} was given")
    if isinstance(target, Batch) and source.order != target.order:  # each is transposed by itself
        return operand_of(target, "rows" if source.order == "C" else "cols")
    return in_one(target)
