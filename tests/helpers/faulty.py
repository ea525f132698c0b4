"""A host backend whose ranks run what is ready in any order, or whose bodies a test corrupts, fails or holds up."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from uncut_mpi.device.host import HostBackend
from uncut_mpi.device.host.bodies import Body
from uncut_mpi.device.host.executor import HostExecutable, HostRun
from uncut_mpi.device.interface import ALONE, Chain, FlagTable, ProgressBoard, Run
from uncut_mpi.model.arguments import Number
from uncut_mpi.planning.lower import Code, OperationList

Fault = Callable[[int, Code, np.ndarray], None]
"""Called after a body, with its task, its code and the region it wrote."""


@dataclasses.dataclass(frozen=True, slots=True)
class Disorder:
    """
    Run what is ready in random order and deliver flags late: missing waits are found with it.

    Attributes
    ----------
    seed : int
        With the rank and the number of the call it fixes every choice.
    pause_s : float, default 1e-4
        Before a body runs, the rank may pause for up to so long, so that ranks drift apart.
    """

    seed: int
    pause_s: float = 1e-4


class FaultyBackend(HostBackend):
    """A host backend with a disorder, a fault after every body, or both."""

    def __init__(
        self,
        local_rank: int,
        ranks_on_node: int,
        *,
        disorder: Disorder | None = None,
        fault: Fault | None = None,
    ) -> None:
        super().__init__(local_rank, ranks_on_node)
        self._disorder, self._fault = disorder, fault

    def executable(
        self, program: OperationList, addresses: np.ndarray, flags: FlagTable, board: ProgressBoard
    ) -> FaultyExecutable:
        """See `Backend.executable`."""
        about = {"blas": self._blas, "spins": self._spins, "files": self.files, "transport": self.transport}
        return FaultyExecutable(program, addresses, flags, board, self._disorder, self._fault, **about)


class FaultyExecutable(HostExecutable):
    """A list of a `FaultyBackend`."""

    def __init__(
        self,
        program: OperationList,
        addresses: np.ndarray,
        flags: FlagTable,
        board: ProgressBoard,
        disorder: Disorder | None,
        fault: Fault | None,
        **about: Any,
    ) -> None:
        super().__init__(program, addresses, flags, board, **about)
        self.disorder, self.calls = disorder, 0
        if fault is not None:
            for index, body in self.bodies.items():
                self.bodies[index] = Watched(body, fault, self.tasks[index], self.codes[index])

    def start(
        self, *, alpha: Number, beta: Number, epoch: int, timeout_s: float, traced: bool = False, chain: Chain = ALONE
    ) -> Run:
        """See `Executable.start`."""
        if self.disorder is None:
            return super().start(alpha=alpha, beta=beta, epoch=epoch, timeout_s=timeout_s, traced=traced)
        self.board.words[self.board.rank] = 0
        self.calls += 1
        return DisorderedRun(self, alpha, beta, epoch & 0xFFFFFFFF, timeout_s, traced)


class Watched(Body):
    """A body with a fault after it."""

    def __init__(self, body: Body, fault: Fault, task: int, code: int) -> None:
        super().__init__(body.write)
        self.copy_bytes = body.copy_bytes
        self._body, self._fault, self._about = body, fault, (task, Code(code), body.write.array)

    def __call__(self, scalars: list[Number], advance: Callable[[], None]) -> None:
        """See `Body`."""
        self._body(scalars, advance)
        self._fault(*self._about)


class DisorderedRun(HostRun):
    """A run of any ready head, which writes flags any time later, each lane's in order."""

    _program: FaultyExecutable

    def __init__(self, program: FaultyExecutable, *arguments: Any) -> None:
        super().__init__(program, *arguments)
        self._late: list[list[int]] = [[] for _ in program.lanes]

    def turns(self) -> Generator[bool]:
        """See `HostRun.turns`."""
        program, disorder = self._program, self._program.disorder
        choices = random.Random(f"{disorder.seed}/{program.rank}/{program.calls - 1}")
        while True:
            moved = self._net.listens and self._net.advance()
            heads = self._heads()
            late = [lane for lane, queue in enumerate(self._late) if queue]
            ready = [lane for lane, index in heads.items() if self._is_ready(index)]
            if not heads and not late and self._net.over:
                return
            if not ready and not late:
                yield moved
                continue
            pick = choices.randrange(len(ready) + len(late))
            if pick >= len(ready):
                lane = late[pick - len(ready)]
                self._signal(self._late[lane].pop(0))
                program.advance(lane)
                yield True
                continue
            lane = ready[pick]
            index = heads[lane]
            if program.codes[index] == Code.SIGNAL:
                self._late[lane].append(index)
                self._at[lane] += 1
                yield True
                continue
            if program.codes[index] <= Code.COMBINE and choices.random() < 0.25:
                time.sleep(choices.random() * disorder.pause_s)
            self._step(lane, index)
            yield True

    def _write_remaining_flags(self) -> None:
        for lane, queue in enumerate(self._late):
            for index in queue:
                self._signal(index)
                self._program.advance(lane)
        super()._write_remaining_flags()


def recorded(kind):
    """Return what makes backends of this kind, and the list of those that it has made."""
    made = []

    def make(rank, ranks):
        made.append(kind(rank, ranks))
        return made[-1]

    return make, made
