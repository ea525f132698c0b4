"""The calls of a session that multiply: at once, or planned for many executions."""

from __future__ import annotations

from typing import Any, Literal

from uncut_mpi.api.dealing import proposed
from uncut_mpi.api.exclusive import public_call
from uncut_mpi.api.gemm_plan import GemmPlan
from uncut_mpi.api.keys import PlanKey
from uncut_mpi.api.matrix import Matrix
from uncut_mpi.api.request import Choices, Request, Scalars, infos_of
from uncut_mpi.api.session_base import SessionBase
from uncut_mpi.api.wanted import NewMatrix, new_result, out_layout_of, possible_results
from uncut_mpi.api.wording import product_asked
from uncut_mpi.errors import ParamError, raised_by_all
from uncut_mpi.model.arguments import Number, flag
from uncut_mpi.model.layout import Layout
from uncut_mpi.model.problem import Trans
from uncut_mpi.planning.options import ScheduleOptions


class Multiplies(SessionBase):
    """The products of a session."""

    @public_call
    def gemm(
        self,
        a: Matrix,
        b: Matrix,
        out: Matrix | None = None,
        *,
        alpha: Number = 1.0,
        beta: Number = 0.0,
        trans_a: Trans = "N",
        trans_b: Trans = "N",
        options: ScheduleOptions | None = None,
        out_layout: Layout | Literal["auto"] | None = None,
        stream: Any = None,
    ) -> Matrix:
        """
        Compute C := alpha op(A) op(B) + beta C. Collective.

        Parameters
        ----------
        a, b : Matrix
            op(A) is m×k, op(B) is k×n; same dtype.
        out : Matrix, optional
            C, m×n, overwritten. By default a new one in C order. Of two whole matrices (`register`, `empty_host`,
            `empty_device`, ``Layout.whole()``) it is a host matrix of all ranks (`empty_host`). Else it is dealt as
            op(A) if that leaves k whole, or as op(B) if that does, or by even rows. It lies in memory of the same kind
            as the operand that it follows, or A.
        alpha, beta : float or complex
            Scalars, complex of complex matrices alone. With beta = 0 C is not read, with alpha = 0 A and B are not.
        trans_a, trans_b : {"N", "T", "C"}
            Whether op transposes, or transposes and conjugates.
        options : ScheduleOptions, optional
            What to fix about the schedule.
        out_layout : Layout or "auto", optional
            How a new C is dealt, also of two whole matrices, instead of by that rule; its memory is as by the rule for
            others. ``"auto"``: as op(A), as op(B), by even rows, columns or blocks, whichever is predicted to take the
            least time. The first such call plans for each of them.
        stream : optional
            Stream whose earlier work must be done first; the current one by default.

        Returns
        -------
        Matrix
            C.

        Raises
        ------
        ParamError
            If arguments do not fit or differ between ranks, or beta is not 0 and there is no C. Also if C overlaps A or
            B in memory, as far as that can be known (see `register`). Nothing was computed.
        CapacityError
            If a device has too little memory for the SoftBuf.
        UncutError
            If a rank failed while computing; C is undefined then.
        """
        if out is None:
            made = self._make_result((a, b), (alpha, beta), (trans_a, trans_b, options), out_layout)
            out, out_layout = made, None
        with self._gate.exclusive():
            try:
                self._backend.mark_caller(stream)  # first: the device comes to it meanwhile
                if out_layout is not None:
                    raise ParamError("out and out_layout were given: pass out, which has a layout, or out_layout")
                scalars, choices = Scalars.of(alpha, beta), Choices.of(trans_a, trans_b, options)
                request = Request("gemm", self._store.operands(a, b, out), scalars, choices)
                plan = self._plans.find(request)
            except Exception as error:
                self._gate.fail("gemm", error)
            self._calls.run(request, plan, self._plans.keep)
        return out

    @public_call
    def matmul(self, a: Matrix, b: Matrix) -> Matrix:
        """Return A B, a new matrix: `gemm` without anything else. Collective."""
        return self.gemm(a, b)

    @public_call
    def plan(
        self,
        a: Matrix,
        b: Matrix,
        c: Matrix,
        *,
        reads_c: bool = True,
        trans_a: Trans = "N",
        trans_b: Trans = "N",
        scales_only: bool = False,
        options: ScheduleOptions | None = None,
    ) -> GemmPlan:
        """
        Plan C := alpha op(A) op(B) + beta C once, for many executions. Collective.

        Parameters
        ----------
        a, b, c : Matrix
            As for `gemm`; others of the same shape, type, order, leading dimension and location
            may be given to `GemmPlan.execute`.
        reads_c : bool, default True
            False promises beta = 0 in every execution, and saves reading C.
        scales_only : bool, default False
            True promises alpha = 0 in every execution, and saves A and B: C is only scaled.

        Raises
        ------
        ParamError, PlanError, CapacityError
            On all ranks.
        """
        with self._gate.call("plan") as open_with:
            operands, choices = self._store.operands(a, b, c), Choices.of(trans_a, trans_b, options)
            promises = {"reads_c": flag("reads_c", reads_c), "scales_only": flag("scales_only", scales_only)}
            key = PlanKey.of(infos_of(operands), choices, **promises)
            open_with(**product_asked("plan", operands, choices._asdict(), promises))
            plan, _ = self._calls.prepare(key, operands, choices)
        return GemmPlan(self, self._calls, plan, operands, choices)

    def _make_result(
        self, given: tuple[object, object], factors: tuple[object, object], chosen: tuple[object, ...], layout: object
    ) -> Matrix:
        """Return a new matrix for op(A) op(B). Collective."""
        with self._gate.call("gemm") as open_with:
            scalars, choices = Scalars.of(*factors), Choices.of(*chosen)
            if scalars.beta != 0:
                raise ParamError(f"beta = {scalars.beta}, but there is no C: pass out=, or beta=0")
            first, second = (self._store.check(name, one) for name, one in zip("AB", given, strict=True))
            wanted = out_layout_of(layout)
            new = None
            if wanted != "auto":
                new = new_result(first, second, choices.trans_a, choices.trans_b, wanted)
                new.layout.rectangles(new.shape, self.size)
            about = scalars._asdict(), choices._asdict(), {"out_layout": wanted}
            open_with(**product_asked("gemm", (first, second), *about))
            made = self._store.empty(new or self._fastest_result(first, second, scalars, choices))
            made.of_torch = first.of_torch or second.of_torch
            return made

    def _fastest_result(self, a: Matrix, b: Matrix, scalars: Scalars, choices: Choices) -> NewMatrix:
        """Return the matrix for op(A) op(B) whose product is predicted to take the least time. Collective."""
        several = possible_results(a, b, choices.trans_a, choices.trans_b, self.size)
        memories = zip(*self._group.allgather_objects([one.memory for one in several]), strict=True)
        promises = {"reads_c": False, "scales_only": scalars.alpha == 0}
        with raised_by_all():
            keys = [
                PlanKey.of((a.info, b.info, proposed(one, of_ranks)), choices, **promises)
                for one, of_ranks in zip(several, memories, strict=True)
            ]
        return several[self._maker.fastest(keys, self._calls.binder.softbuf_bytes)]
