"""Matrices of a session: what every rank knows of them, and what their owner alone holds."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import numpy as np

from uncut_mpi.api.gate import public_call
from uncut_mpi.api.stored import in_library, in_order
from uncut_mpi.api.typed import overload
from uncut_mpi.api.views import Several, View, info_of, piece_of, slices_of
from uncut_mpi.errors import ParamError, PlanError, agreed
from uncut_mpi.instead import absent
from uncut_mpi.mappings import Stretch
from uncut_mpi.model.alike import Alike
from uncut_mpi.model.arguments import counted
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.layout import Layout
from uncut_mpi.model.locations import Location, Memory
from uncut_mpi.model.parts import BoundLayout, Part, Rectangle
from uncut_mpi.model.positions import Orders, indices_of, pieces_in
from uncut_mpi.model.problem import Order, StoredMatrix
from uncut_mpi.units import name_ranks

if TYPE_CHECKING:
    from uncut_mpi.api.batch import Batch

Home: TypeAlias = weakref.ref[Any]
"""A session, as its matrices know it: they do not keep it."""

Name: TypeAlias = int | tuple[int, View | Several]
"""By what calls know a matrix: its number, of a view with what it is of that matrix, or of several of a batch."""

_READ_ONLY: Final = "is a read-only array{where}, or lies in a file that a device may only read: pass a writeable one"


@dataclasses.dataclass(frozen=True, slots=True)
class HeldPart:
    """A part of a matrix, and the memory that its holder has it in."""

    part: Part  # which rectangle of the matrix, and how it is stored
    holder: int  # the rank whose array it is
    # The bytes from its first element to its last, as all ranks know them. Shared host memory is one stretch.
    stretches: tuple[Stretch, ...]
    # For device memory: the exported allocation it lies in; None if that cannot be exported.
    handle: bytes | None = None
    offset_bytes: int = 0  # from that allocation's base to its first element
    # Why its owner alone can use it: device memory cannot be exported, private host memory not be page-locked, or it
    # lies in a file. Empty if others can.
    obstacle: str = ""
    in_file: bool = False  # whether it lies in a file


@dataclasses.dataclass(frozen=True, slots=True)
class MatrixInfo:
    """What every rank of the session knows of a matrix."""

    number: int  # the session's number for it, the same on all ranks
    layout: BoundLayout  # shape, and which part lies where; rows and columns as the caller sees them
    dtype: DType  # element type
    parts: tuple[HeldPart, ...]  # those of `layout`, in its order. Of a matrix without elements one that has none.
    dealt: Layout | None = None  # how it is dealt to ranks, with counts; None where single parts were given
    read_only: tuple[int, ...] = ()  # ranks that have parts which may not be written; with any of them it cannot be C
    # What of the matrix of that number it is, if not all; or that it is several put together as one operand.
    view: View | Several | None = None
    file: str = ""  # the file that it lies in, of several the first; empty for memory
    # Of a view, or in other orders: what each part is of. That is the number of a matrix, that of a part there, and how
    # many bytes of this are ahead.
    origins: tuple[tuple[int, int, int], ...] = ()
    # By what calls know it: its number, of a view with what it is of that matrix.
    name: Name = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.number if self.view is None else (self.number, self.view))

    def __str__(self) -> str:
        return str(self.view) if isinstance(self.view, Several) else f"matrix {self.number}{self.view or ''}"

    def origin(self, part: int) -> tuple[int, int, int]:
        """Return the numbers of the matrix and of the part there that a part is of, and how many bytes are ahead."""
        return self.origins[part] if self.origins or self.view is not None else (self.number, part, 0)

    def in_orders(self, orders: Orders) -> MatrixInfo:
        """Return the same matrix with its rows and columns in other orders, in as many parts as that takes."""
        if self.layout.orders == orders:
            return self
        parts, origins = [], []
        for piece in pieces_in(self.layout, orders):
            held, start = piece_of(self.parts[piece.number], piece.part, piece.row, piece.col, self.dtype.itemsize)
            number, part, before = self.origin(piece.number)
            parts.append(held)
            origins.append((number, part, before + start))
        layout = BoundLayout(self.layout.shape, tuple(held.part for held in parts), self.layout.word, orders)
        return dataclasses.replace(self, layout=layout, parts=tuple(parts) or self.parts, origins=tuple(origins))

    @property
    def seen(self) -> View:
        """What of the matrix of that number it is."""
        if isinstance(self.view, Several):  # which is asked for a part where a product is done in chunks
            raise agreed(PlanError(f"{self} has too many products for one schedule: multiply it in several calls"))
        return self.view or View((0, self.layout.shape[0]), (0, self.layout.shape[1]))

    @property
    def products(self) -> Alike[tuple[int, int]]:
        """Rows and columns of each matrix of a batch; none of what is no batch."""
        return self.view.shapes if isinstance(self.view, Several) else Alike()

    @property
    def in_parts(self) -> bool:
        """Whether the matrix lies in several arrays, or has only the blocks on its diagonal."""
        return len(self.parts) > 1 or bool(self.layout.blocks)

    @property
    def stored(self) -> StoredMatrix:
        """Shape, order and leading dimension; of a matrix in parts the order of most, and the least dimension."""
        if self.in_parts:
            return StoredMatrix(*self.layout.shape, self.layout.order)
        part = self.parts[0].part
        return StoredMatrix(*self.layout.shape, part.order, part.ld)

    @property
    def location(self) -> Location | None:
        """Where it lives; None if it is in parts."""
        return None if self.in_parts else self.parts[0].part.location

    def in_order(self, order: Order) -> MatrixInfo:
        """Return the same matrix with every part read in an order that can be: single rows and columns."""
        parts = tuple(dataclasses.replace(held, part=in_order(held.part, order)) for held in self.parts)
        layout = dataclasses.replace(self.layout, parts=tuple(held.part for held in parts if self.layout.parts))
        return dataclasses.replace(self, layout=layout, parts=parts)

    def elements_not_in(self, order: Order) -> int:
        """Return how many elements are stored in another order."""
        return sum(held.part.elements for held in self.parts if held.part.order != order)

    @property
    def conjugated(self) -> bool:
        """Whether it is a view whose elements are the conjugates of those in memory."""
        return self.view is not None and self.view.conjugated

    def check_in_memory(self) -> None:
        """Raise ParamError for a conjugated view, which only products can use."""
        if self.conjugated:
            raise ParamError(f"{self} is conjugated, which products alone do: pass the matrix, or its .T, instead")

    @property
    def read_only_text(self) -> str:
        """Why it cannot be C, and what to do, where ranks have parts that may not be written."""
        if self.file:
            return f"is in the file {self.file}, which was opened to be read: open it with mode='r+'"
        return _READ_ONLY.format(where=f" ({name_ranks(self.read_only)})" if self.in_parts else "")

    @property
    def obstacle(self) -> str:
        """Why the owner alone can use a part; empty if others can use all."""
        return next((held.obstacle for held in self.parts if held.obstacle), "")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LocalParts:
    """What this rank has of a matrix."""

    rectangles: tuple[Rectangle, ...]  # rows and columns of each part, also of those without elements
    arrays: tuple[Any, ...]  # the parts; none where `empty` makes one that has no elements
    # Address and array of each part in `MatrixInfo.parts` that this process has, by its number.
    own: Mapping[int, tuple[int, Any]]
    memory: Memory  # "device", "host" or "shared": where they lie, or would lie if there were any
    empty: Callable[[int, int], Any]  # makes an array (rows, cols) in that memory


class ShowsMemory:
    """
    Shows by DLPack what this rank has of a matrix, or batch: for ``torch.from_dlpack(matrix)`` and others. Local.

    That is `local`, without a copy; on a rank that has nothing of what it sees, as of `Session.empty_host`, `array`.
    The stream of who takes it waits for products in flight, and for the current streams of cupy and torch. For host
    memory the program waits.

    Raises
    ------
    ParamError
        If this rank has no array or several, the memory is read-only, or elements are conjugated in no memory.
    BufferError
        If a copy is asked for, or another device.
    """

    _to_show: Callable[[], tuple[Matrix, Any]]
    """Returns the matrix, or that of a batch, and the array."""

    def __dlpack_device__(self) -> tuple[int, int]:
        matrix, array = self._to_show()
        return cast(tuple[int, int], matrix._session("show")._memory(matrix, array).__dlpack_device__())

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        matrix, array = self._to_show()
        session = matrix._session("show")
        memory = session._memory(matrix, array)
        if copy or (dl_device is not None and tuple(map(int, dl_device)) != memory.__dlpack_device__()):
            raise BufferError(f"{self} is shown where it is, without a copy: copy what is made of it")
        session._let_follow(stream, memory)
        return memory.__dlpack__()


_MOST_SEEN: Final = 2048
"""Views of a matrix, times its parts, of which is kept what all ranks know."""


class Matrix(ShowsMemory):
    """
    A matrix that a session can multiply; made by `Session.distribute`, `empty`, `register` and those beside them.

    numpy takes it for its array where this rank has all of it in host memory: ``numpy.asarray(matrix)`` is that array,
    and ``numpy.allclose(matrix, x)`` compares it. Elements and operators are the array's, but for ``a @ b``: that is
    ``session.matmul(a, b)`` of two matrices, a collective call.

    ``matrix[2:5, :3]``, ``matrix.T`` and ``matrix.H`` are views: matrices of the same session in the same memory. They
    can be A, B or (but for `H`) C, and keep the matrix alive. Any rank may make one, at any time; in a call all ranks
    pass the same one.
    """

    def __init__(
        self, info: MatrixInfo, *, array: Any, local: LocalParts, home: Home | None = None, whole: Matrix | None = None
    ) -> None:
        self.info = info
        self._array = array  # None where this rank has not all of it, and of a conjugated view
        self._local = local  # of a view what there is of all the matrix
        self._whole = whole  # of which it is a view
        self._nothing: Any = None  # an array without elements, once it was asked for
        self._seen: dict[View, MatrixInfo] = {}  # of views, also of those that are no more: to make one takes 100 us
        self._views: weakref.WeakValueDictionary[View | Several, Matrix] = weakref.WeakValueDictionary()
        self._tensors: dict[int, Any] = {}  # of `local` and (-1) `array`, once they were asked for
        # What `local` and `array` are of (`library_of`): what was given is, or what the session made the matrix of.
        self.library = ""
        self.closed, self.home = False, home  # until it is released

    @property
    def array(self) -> Any:
        """
        All of the matrix as this rank sees it, of the library that `local` is of.

        Of host matrices that all ranks read the shared array, of those of one rank and replicas the holder's. Of a
        conjugated view a conjugated copy.

        Raises
        ------
        ParamError
            If this rank does not see all of it, as of a matrix that is dealt to several.
        """
        return self._in_library(self.__array__() if self._array is None else self._array, -1)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.info.layout.shape

    @property
    def dtype(self) -> DType:
        """Element type."""
        return self.info.dtype

    @property
    def order(self) -> Order:
        """``"F"`` or ``"C"``: how it is stored, or most of its parts."""
        return self.info.stored.order

    @property
    def address(self) -> int:
        """Address of the first element that this rank has, in this process; 0 if it has none."""
        found = (own[0] for own in map(self.own_part, range(len(self.info.parts))) if own is not None)
        return 0 if self.info.view is not None and 0 in self.shape else next(found, 0)

    def own_part(self, at: int) -> tuple[int, Any] | None:
        """Return address and array of a part of `MatrixInfo.parts`, None if this process does not have it."""
        _, number, start = self.info.origin(at)
        own, view = self._local.own.get(number), self.info.view
        if own is None or view is None:
            return own
        whole = self.whole.info
        part = whole.parts[number].part
        if isinstance(view, View):
            return own[0] + start, view.taken(own[1], (part.rows, part.cols), whole.layout.orders)
        its = self.info.parts[at].part
        (height, width), (along, across) = its.stored_shape, divmod(start // self.dtype.itemsize, part.ld)
        lines = own[1] if part.order == "F" else own[1].T
        block = lines[across : across + height, along : along + width]
        return own[0] + start, block if its.order == "F" else block.T

    @property
    def location(self) -> Location | None:
        """Where the matrix lives; None if it is in parts."""
        return self.info.location

    @property
    def whole(self) -> Matrix:
        """The matrix that this one is a view of, or itself."""
        return self._whole or self

    @property
    def layout(self) -> Layout | None:
        """How the matrix is dealt to ranks, with all counts; None if it was made by `Session.distribute_parts`."""
        return self.info.dealt

    @property
    def local(self) -> Any:
        """
        What this rank has of the matrix: the very array that was given, of the part's shape; without rows 0×n.

        Of a matrix in shared memory a view of this rank's part, of replicas this rank's. Of one that was made by
        `Session.distribute_parts` a tuple of arrays, as they were given. Of a conjugated view a conjugated copy.

        What the session made of tensors of torch, or arrays of JAX, is of these too: as A, or as B where A is of
        neither. A rank that gave no array has what the first one has that did. All else is of numpy, or on a GPU of
        cupy, also where this process has not loaded that library. JAX takes its arrays for constants: those that were
        asked for before a product has written the matrix again are void.
        """
        arrays = tuple(self._in_library(array, at) for at, array in enumerate(self.arrays_here()))
        return arrays if self.info.dealt is None else arrays[0]

    def _in_library(self, array: Any, at: int) -> Any:
        library = self.whole.library
        if at in self._tensors:
            return self._tensors[at]
        made = in_library(array, library)
        if library == "torch" and not self.info.conjugated:  # so that a plan knows it again; others may be copies
            self._tensors[at] = made
        return made

    def arrays_here(self) -> tuple[Any, ...]:
        """Return what this rank has of the matrix: arrays that were given, or of numpy or cupy. Local."""
        if self.info.file:
            raise ParamError(
                f"{self} lies in the file {self.info.file}, of which no rank has an array: session.download(matrix), "
                "on all ranks, reads it into memory"
            )
        local, view = self._local, self.info.view
        arrays = local.arrays
        if not arrays and self.info.dealt is not None:
            whole = self.whole
            if whole._nothing is None:
                whole._nothing = local.empty(*(stop - start for start, stop in local.rectangles[0]))
            arrays = (whole._nothing,)
        if isinstance(view, View):
            orders = self.whole.info.layout.orders
            arrays = tuple(
                view.taken(array, where, orders) for array, where in zip(arrays, local.rectangles, strict=False)
            )
            if view.conjugated:
                arrays = tuple(array.conj() for array in arrays)
        return arrays

    @property
    def local_indices(self) -> Any:
        """
        Which rows and which columns of the matrix `local` has, as two arrays.

        Of a matrix that was made by `Session.distribute_parts` a tuple of such pairs.
        """
        rectangles, view = self._local.rectangles, self.info.view
        if isinstance(view, View):
            orders = self.whole.info.layout.orders
            rectangles = tuple(view.placed(one, orders) for one in rectangles)
        found = tuple(indices_of(one, self.info.layout.orders) for one in rectangles)
        return found[0] if self.info.dealt is not None else found

    @property
    def rectangles(self) -> tuple[Rectangle, ...]:
        """Where this rank's parts lie, as they were given: positions in the orders of rows and columns."""
        return self._local.rectangles

    @property
    def memory(self) -> Memory:
        """Where `local` lies: ``"device"``, ``"host"`` (private to this rank) or ``"shared"``."""
        return self._local.memory

    def __repr__(self) -> str:
        rows, cols = self.shape
        where = f"in parts ({self.info.layout})" if self.info.in_parts else f"at {self.location}"
        if self.info.file:
            where = f"in the file {self.info.file}"
        return f"<{str(self.info).capitalize()}: {rows}×{cols} {self.dtype.name} {self.order}-order {where}>"

    # -- views -------------------------------------------------------------------------------

    def __getitem__(self, key: slice | tuple[slice, slice]) -> Matrix:
        """
        Return some rows and columns as a matrix in the same memory. Local.

        Raises
        ------
        TypeError, ParamError
            For anything but slices without a step; if the matrix was released.
        """
        return self._view(self.info.seen.sliced(*slices_of(key, self.shape)))

    @property
    def T(self) -> Matrix:
        """The transposed matrix in the same memory."""
        return self._view(self.info.seen.transposed)

    @property
    def H(self) -> Matrix:
        """The conjugate transpose in the same memory; of a real matrix `T`. It can be A or B."""
        seen = self.info.seen.transposed
        return self._view(seen._replace(conjugated=self.dtype.is_complex and not seen.conjugated))

    def _view(self, view: View) -> Matrix:
        whole = self.whole
        if self.closed:
            raise ParamError(f"{self} was released, or its session was closed: there are no views of it")
        if view == whole.info.seen:
            return whole
        found = whole._views.get(view)
        if found is None:
            info = whole._seen.get(view)
            if info is None:
                if (len(whole._seen) + 1) * len(whole.info.parts) > _MOST_SEEN:
                    whole._seen.clear()
                info = whole._seen[view] = info_of(whole.info, view)
            array, (rows, cols) = whole._array, whole.shape  # none of files
            found = Matrix(info, array=None, local=whole._local, home=whole.home, whole=whole)
            if view.conjugated:
                pass  # no array has its elements
            elif array is not None:
                found._array = view.taken(array, ((0, rows), (0, cols)), (None, None))
            elif not info.in_parts and not info.file and (own := found.own_part(0)) is not None:
                found._array = own[1]
            whole._views[view] = found
        return found

    def end(self) -> None:
        """Mark the matrix and its views as released. Local."""
        for matrix in (self, *self._views.values()):
            matrix.closed, matrix.home = True, None
        self._seen.clear()

    # -- other libraries ---------------------------------------------------------------------

    @public_call
    def to_dtensor(self, mesh: Any) -> Any:
        """
        Return the matrix as a DTensor of PyTorch over the same memory. Collective.

        Parameters
        ----------
        mesh : torch.distributed.device_mesh.DeviceMesh
            Each process of it is a rank of the session, in any order; ranks that are not in it pass it too.

        Returns
        -------
        torch.distributed.tensor.DTensor
            Placed by ``Shard`` and ``Replicate`` so that each rank's local tensor has the memory of `local`, and keeps
            it alive. Products into the matrix change it.

        Raises
        ------
        ParamError
            On all ranks. If no placements deal it so: parts must be those of ``torch.chunk``, in the order of the
            mesh; the error names a layout to redistribute to. If it lies in memory of another kind than the mesh is of,
            or is read-only.
        """
        return self._session("show")._shown("to_dtensor", self, mesh)

    @public_call
    def to_jax(self, mesh: Any) -> Any:
        """
        Return the matrix as an array of JAX over the same memory. Collective.

        Parameters
        ----------
        mesh : jax.sharding.Mesh
            Each device of it is one rank's, in any order. So with several ranks JAX has to know of all of them
            (``jax.distributed.initialize``).

        Returns
        -------
        jax.Array
            With a `NamedSharding`, of which each shard has the memory of `local`, and keeps it alive. JAX takes it for
            a constant: write the matrix again only when what JAX computes of it is ready.

        Raises
        ------
        ParamError
            On all ranks. If no sharding deals it so: parts must be of one shape, in the order of the mesh; the error
            names a layout to redistribute to. If JAX would have to copy: it takes memory without gaps between rows or
            columns, on the host from a multiple of 64 bytes on (`Session.empty` makes such). If elements have 64 bits
            and ``jax_enable_x64`` is not set.
        """
        return self._session("show")._shown("to_jax", self, mesh)

    def _to_show(self) -> tuple[Matrix, Any]:
        self.info.check_in_memory()
        arrays = self.arrays_here()
        full = [one for one in arrays if 0 not in one.shape]
        if self.info.dealt is None and len(full) != 1:
            raise ParamError(
                f"{self} has {counted(len(full), 'array')} on this rank, and one is shown: pass one of matrix.local"
            )
        return self, (full or [arrays[0] if self._array is None else self._array])[0]

    def _session(self, use: str) -> Any:
        """Return the session, or raise ParamError if there is nothing to use."""
        session = None if self.home is None else self.home()
        if session is None:
            raise ParamError(f"{self} was released, or its session was closed: there is nothing to {use}")
        return session

    # -- what numpy and operators make of it -------------------------------------------------

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """
        Return this rank's array, for numpy.

        Raises
        ------
        ParamError
            If the matrix was released, or this rank does not have it in host memory; with the mend.
        """
        if self.closed:
            raise ParamError(f"{self} was released, or its session was closed: numpy can have no array of it")
        array = self._array
        if self.info.conjugated:
            array = np.conj(np.asarray(self._view(self.info.seen._replace(conjugated=False))))
        if not isinstance(array, np.ndarray):
            location = self.location
            if self.info.file:
                found = f"lies in the file {self.info.file}"
            elif array is not None:
                found = "lies on a GPU: its array there is .array"
            elif location is None:
                found = "is not on this rank as a whole: what is here of it is .local"
            else:
                where = "host memory" if location.space == "host" else "device memory"
                whose = "the first node" if location.rank is None else f"rank {location.rank}"
                found = f"lies in the {where} of {whose}, not of this one"
            mend = "session.download(matrix), on all ranks, is one that numpy can read"
            if over_nodes(self):  # of what that is in, ranks of other nodes see nothing
                mend = "session.gather(matrix, root=r), on all ranks, returns an array of it on rank r"
            raise ParamError(f"{self} {found}; {mend}")
        if dtype is None or array.dtype == dtype:
            return array.copy() if copy else array
        if copy is False:
            raise ValueError(f"{self} is {array.dtype} and cannot become {np.dtype(dtype)} without a copy")
        return array.astype(dtype)

    def _no_elements(self, *key: object) -> Any:
        raise TypeError(f"{self} has no elements of its own: those that this rank has are in .local, or .array")

    __setitem__ = __delitem__ = __iter__ = __contains__ = _no_elements

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self} belongs to its session and process, and cannot be copied or sent: use its .array, or "
            "session.download(matrix), on all ranks, for one that all can read"
        )

    @overload
    def __matmul__(self, other: Matrix) -> Matrix: ...
    @overload
    def __matmul__(self, other: Batch) -> Batch: ...
    def __matmul__(self, other: object) -> Any:
        """Return A B, a new matrix, as ``session.matmul(a, b)`` does. Collective."""
        if hasattr(other, "__array_ufunc__"):
            return self._no_operator("@", other)
        return self._session("multiply").matmul(self, other)  # which tells all ranks what is no matrix

    def _no_operator(self, symbol: str, other: object = None, mend: str = "use numpy.asarray(matrix) or .array") -> Any:
        """Leave an operator to an array on its other side, which knows what to do; else raise TypeError."""
        if hasattr(other, "__array_ufunc__"):
            return NotImplemented
        raise TypeError(f"a Matrix has no operator {symbol}: {mend}")

    if not TYPE_CHECKING:  # who checks types is to see what there is
        __getattr__ = absent


for _name, _symbol in (
    *(("add", "+"), ("sub", "-"), ("mul", "*"), ("truediv", "/"), ("floordiv", "//"), ("mod", "%"), ("pow", "**")),
    *(("radd", "+"), ("rsub", "-"), ("rmul", "*"), ("rtruediv", "/"), ("neg", "-"), ("abs", "abs")),
):
    setattr(Matrix, f"__{_name}__", functools.partialmethod(Matrix._no_operator, _symbol))


def concerns(name: Name, number: int) -> bool:
    """Return whether a name is of the matrix of a number, of a view of it, or of several of which it is one."""
    if isinstance(name, int):
        return name == number
    of, view = name
    return number in view.numbers if isinstance(view, Several) else number == of


def over_nodes(matrix: Matrix) -> bool:
    """Return whether the ranks of a matrix are on several nodes; False where its session has ended. Local."""
    session = None if matrix.home is None else matrix.home()
    return session is not None and session.machine.num_nodes > 1
