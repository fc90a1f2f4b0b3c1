"""Tools of the benchmarks: timing, gradients, statistics, jobs, and tables and files of results."""
