"""The only user of MPI: the ranks of a session, what they agree on and what they hand each other."""
