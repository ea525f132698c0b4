"""
The device backend where there is no GPU: numpy, and shared memory as every rank's device memory.

Only the tasks of an operation list move data, so a wrong schedule gives a wrong answer here too.
"""

from uncut_mpi.device.host.backend import HostBackend
from uncut_mpi.device.host.bodies import Fault
from uncut_mpi.device.host.executor import Disorder

__all__ = ["HostBackend", "Disorder", "Fault"]
