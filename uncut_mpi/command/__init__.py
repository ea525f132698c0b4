"""Pieces of the command modules that need no MPI: arguments, matrix files, generated data, result check, report."""
