"""Benchmarks: training tasks, the emulated cluster, micro-benchmarks. Importing the package loads none of them."""
