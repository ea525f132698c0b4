"""What plans may use of devices' memory, and of host memory."""

from __future__ import annotations

from typing import Final

from uncut_mpi.device.interface import Backend
from uncut_mpi.errors import CapacityError, agreed
from uncut_mpi.free_memory import available_bytes
from uncut_mpi.model.machine import Machine
from uncut_mpi.planning.staging import usual_room
from uncut_mpi.spmd.agreement import by_rank
from uncut_mpi.spmd.group import Group
from uncut_mpi.units import bytes_text

USUAL_PART: Final = 0.8
"""What of the free memory plans use where nobody says: the program and libraries take some later."""

STEPS: Final = 16
"""The usual budget is a multiple of this part of a device's memory, so that plans are the same from run to run."""


class Budget:
    """
    How many bytes of memory each rank's part of a plan may have, beside the caller's matrices.

    Parameters
    ----------
    group, backend, machine
        Those of the session.
    device_memory, host_memory : int
        What its caller allows (bytes); 0: four fifths of what is free, and a rank's share of half of it. Where devices
        take host memory, the first is of what the second leaves.
    sharing : int
        Ranks that use this rank's device.
    """

    def __init__(
        self, group: Group, backend: Backend, machine: Machine, device_memory: int, sharing: int, host_memory: int = 0
    ) -> None:
        self._group, self._backend, self._sharing = group, backend, sharing
        self.device_memory, self.host_memory = device_memory, host_memory
        self._step = int(machine.memory_bytes.min()) // STEPS

    def agree(self, asked: int, held: int) -> int:
        """
        Return the budget of a plan that is about to be made, the same on all ranks. Collective.

        Parameters
        ----------
        asked : int
            What its caller allows (bytes), 0 for the session's.
        held : int
            Bytes that this rank has from earlier plans, which this one may use too.

        Raises
        ------
        CapacityError
            On all ranks, if a rank has less than what was asked for.
        """
        free = self._group.allgather_objects(self._backend.memory()[0] // self._sharing + held)
        asked = asked or self.device_memory
        least = min(free)
        if asked > least:
            raise agreed(
                CapacityError(
                    f"device_memory = {bytes_text(asked)} was asked for, and rank {free.index(least)} has "
                    f"{bytes_text(least)} ({by_rank([bytes_text(one) for one in free])}): ask for less, free device "
                    "memory, or leave it out"
                )
            )
        usual = int(USUAL_PART * (least - usual_room(least) * self._backend.takes_host_memory))
        return asked or usual // self._step * self._step or usual

    def agree_host(self, asked: int) -> int:
        """
        Return what each rank may use of host memory for copies, the same on all ranks. Collective.

        Parameters
        ----------
        asked : int
            What the plan's caller allows (bytes), 0 for the session's.

        Raises
        ------
        CapacityError
            On all ranks, if a rank's share of what is free is less than what was asked for.
        """
        free = min(self._group.allgather_objects(available_bytes()[0])) // self._group.size
        asked = asked or self.host_memory
        if asked > free:
            raise agreed(
                CapacityError(
                    f"host_memory = {bytes_text(asked)} was asked for, and each of {self._group.size} ranks has "
                    f"{bytes_text(free)} of the host memory that is free: ask for less, free some, or leave it out"
                )
            )
        return asked or usual_room(free)
