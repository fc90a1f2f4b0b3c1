"""What this process finds itself in: its launcher, its end, its GPUs."""
