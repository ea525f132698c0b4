"""Devices: two backends behind one small interface. Imports neither MPI nor `spmd`."""
