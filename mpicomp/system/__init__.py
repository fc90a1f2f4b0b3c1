"""The surroundings of this process: its launcher, its end, its GPUs."""
