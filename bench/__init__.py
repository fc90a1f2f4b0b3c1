"""Benchmarks: training tasks, the emulated cluster, micro-benchmarks. Importing the package loads no module."""
