"""The façade that an MPI program embeds: sessions, matrices, plans. It wires the packages together."""
