import pytest
import uncut_mpi as um
@pytest.fixture(scope="session")
def comm():
    from mpi4py import MPI
    return MPI.COMM_WORLD
@pytest.fixture(scope="module")
def session(comm):
    with um.Session(comm, backend="host", machine=um.Machine.uniform(comm.size), timeout_s=30, verify=True) as session:
        yield session
