"""What of the command modules needs no MPI: arguments, matrix files, generated data, result check, report."""
