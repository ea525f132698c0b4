"""
The device backend where there is no GPU: numpy, and shared memory as every rank's device memory.

Only the tasks of an operation list move data, so a wrong schedule gives a wrong answer here too.
"""

from uncut_mpi.device.host.backend import HostBackend

__all__ = ["HostBackend"]
