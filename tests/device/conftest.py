"""Fixtures of tests that need a device."""

from device.kinds import emulated, joining_place, place, torch_memory

__all__ = ["emulated", "joining_place", "place", "torch_memory"]
