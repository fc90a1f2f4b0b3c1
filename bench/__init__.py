"""What is measured: training tasks, the emulated cluster, micro-benchmarks. Importing it loads none of them."""
