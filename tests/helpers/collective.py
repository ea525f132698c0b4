def collective_assert(comm, ok, detail=""):
    r = comm.allgather((bool(ok), str(detail)))
    assert all(a for a,_ in r), [(i,d) for i,(a,d) in enumerate(r) if not a]
