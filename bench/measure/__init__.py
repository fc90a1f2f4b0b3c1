"""What benchmarks measure with: timing, gradients, statistics, jobs, and what they print and write."""
