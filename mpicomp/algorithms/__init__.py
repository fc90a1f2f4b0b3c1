"""Algorithms: a compressor and the exchange that nobody else uses, one file or folder each."""
