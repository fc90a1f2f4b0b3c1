"""Sums and means of single arrays, without state and within an error bound."""
