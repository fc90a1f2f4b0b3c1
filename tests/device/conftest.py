"""Fixtures of tests that need a device."""

from device.kinds import _built, emulated, joining_place, place

__all__ = ["_built", "emulated", "joining_place", "place"]
