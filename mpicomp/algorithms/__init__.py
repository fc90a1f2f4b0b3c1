"""Algorithms: a compressor and the exchange that only it uses, one file each."""
