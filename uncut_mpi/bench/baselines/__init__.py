"""
Other libraries' products, measured beside ours by the bench command.

Each library runs in a process of its own (``python -m uncut_mpi.bench.baselines``) that has all the devices: what it
loads, allocates and spawns stays there. The ranks hand it matrices in shared memory and get times and a result back;
they check that result as they check their own.
"""
