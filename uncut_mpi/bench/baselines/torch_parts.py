"""Parts of dealt matrices as PyTorch's tensors, a process each, and what moves them from one layout to another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from uncut_mpi.bench.baselines.job import JobLibrary
from uncut_mpi.bench.baselines.library import Unsupported
from uncut_mpi.bench.baselines.torch_sharded import import_torch
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.layout import Layout

_Picked: TypeAlias = Any
"""A slice, or a tensor of positions."""


class TorchJobLibrary(JobLibrary):
    """
    PyTorch in every process, its processes as one group.

    Parameters
    ----------
    backend : str
        ``"cuda"``, or ``"host"``: then every device is the CPU.
    """

    def __init__(self, backend: str) -> None:
        self.torch = torch = import_torch()
        super().__init__()
        cuda = backend == "cuda"
        self.agree(
            not cuda or torch.cuda.device_count() >= self.size,
            f"PyTorch does not see a GPU for each of {self.size} ranks",
        )
        self.device = torch.device(f"cuda:{self.rank}" if cuda else "cpu")
        if cuda:
            torch.cuda.set_device(self.device)
        if not torch.distributed.is_initialized():  # else another library of this process has done it
            # The first process listens where the system says, the others are told.
            port, store = 0, None
            make = torch.distributed.TCPStore
            if self.rank == 0:
                store = make("127.0.0.1", 0, self.size, is_master=True, wait_for_workers=False)
                port = store.port
            port = self.comm.bcast(port)
            store = store or make("127.0.0.1", port, self.size, is_master=False)
            torch.distributed.init_process_group(
                "nccl" if cuda else "gloo", store=store, rank=self.rank, world_size=self.size
            )
        self.version = f"PyTorch {torch.__version__}"

    def tensor(self, array: np.ndarray, *, on_host: bool = False) -> Any:
        """Return a copy of an array, strides and all, on this process's device or in page-locked host memory."""
        torch = self.torch
        half = DType.parse(array.dtype) is DType.bf16  # which torch does not take from NumPy
        tensor = torch.from_numpy(array.view(np.int16) if half else array)
        tensor = tensor.view(torch.bfloat16) if half else tensor
        if not on_host:
            return tensor.to(self.device, copy=True)
        return tensor.pin_memory() if self.device.type == "cuda" else tensor.clone()

    def array(self, tensor: Any, dtype: DType) -> np.ndarray:
        """Return a tensor as an array of a type."""
        held = tensor.cpu()
        half = dtype is DType.bf16
        array: np.ndarray = held.view(self.torch.int16).numpy().view(dtype.numpy) if half else held.numpy()
        return array

    def finish(self) -> None:
        """Wait until the device has done everything."""
        if self.device.type == "cuda":
            self.torch.cuda.synchronize(self.device)


class Move:
    """
    The move of a matrix from one layout to another: packed, exchanged by one all-to-all, unpacked.

    Parameters
    ----------
    library : TorchJobLibrary
        Whose processes have the parts.
    shape : (int, int)
        Of the matrix.
    source, target : Layout
        How it is dealt and how it shall be.
    dtype : torch.dtype
        Its type.
    """

    def __init__(
        self, library: TorchJobLibrary, shape: tuple[int, int], source: Layout, target: Layout, dtype: Any
    ) -> None:
        self._library = library
        torch, rank, size = library.torch, library.rank, library.size

        def parts(layout: Layout) -> list[tuple[np.ndarray, np.ndarray]]:
            return [layout.indices(shape, one, num_ranks=size) for one in range(size)]

        sources, targets = parts(source), parts(target)
        self._sent = [self._common(sources[rank], one) for one in targets]
        self._received = [self._common(targets[rank], one) for one in sources]
        counts = [[rows * cols for _, _, (rows, cols) in some] for some in (self._sent, self._received)]
        self._out, self._into = (torch.empty(sum(some), dtype=dtype, device=library.device) for some in counts)
        self._splits = [[count * self._out.element_size() for count in some] for some in counts]

    def _common(
        self, mine: tuple[np.ndarray, np.ndarray], other: tuple[np.ndarray, np.ndarray]
    ) -> tuple[_Picked, _Picked, tuple[int, int]]:
        """Return which rows and columns of what is mine another process has too, and how many."""
        found, counts = [], []
        for here, there in zip(mine, other, strict=True):
            at = np.intersect1d(here, there, assume_unique=True, return_indices=True)[1]
            counts.append(len(at))
            if len(at) == 0 or (np.diff(at) == 1).all():
                begin = int(at[0]) if len(at) else 0
                found.append(slice(begin, begin + len(at)))
            else:
                found.append(self._library.torch.from_numpy(at).to(self._library.device))
        return found[0], found[1], (counts[0], counts[1])

    def __call__(self, source: Any, target: Any) -> None:
        """Move: both are this process's parts, of any strides."""
        begin = 0
        for rows, cols, shape in self._sent:
            count = shape[0] * shape[1]
            picked = source[rows] if isinstance(rows, slice) else source.index_select(0, rows)
            picked = picked[:, cols] if isinstance(cols, slice) else picked.index_select(1, cols)
            self._out[begin : begin + count].view(shape).copy_(picked)
            begin += count
        out, into = (buffer.view(self._library.torch.uint8) for buffer in (self._out, self._into))
        self._library.torch.distributed.all_to_all_single(into, out, self._splits[1], self._splits[0])
        begin = 0
        for rows, cols, shape in self._received:
            block = self._into[begin : begin + shape[0] * shape[1]].view(shape)
            begin += shape[0] * shape[1]
            if isinstance(rows, slice):
                within = target[rows]
                if isinstance(cols, slice):
                    within[:, cols].copy_(block)
                else:
                    within.index_copy_(1, cols, block)
            elif isinstance(cols, slice):
                target[:, cols].index_copy_(0, rows, block)
            else:
                target.index_put_((rows[:, None], cols[None]), block)


def even(kind: str, shape: tuple[int, int], order: Sequence[int]) -> Layout:
    """Return rows or columns in equal parts, dealt to ranks in an order; Unsupported where they cannot be equal."""
    if shape[kind == "cols"] % len(order):
        raise Unsupported(f"{shape[0]}x{shape[1]} cannot be dealt to {len(order)} ranks in equal {kind}")
    return Layout.rows(ranks=order) if kind == "rows" else Layout.cols(ranks=order)
