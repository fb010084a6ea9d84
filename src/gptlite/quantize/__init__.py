"""Fewer bits: number formats, quantised weights, and models trained for them."""
