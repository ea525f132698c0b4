"""Pure planning: problem, machine and options in; schedules and operation lists out. No MPI, GPU, clock, randomness."""
