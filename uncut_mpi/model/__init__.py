"""Values: problems, placements, machines and bounds. Imports numpy and ml_dtypes only; no MPI, GPU or clock."""
