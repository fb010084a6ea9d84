"""Caches of keys and values: one contract, and the places that keep what it promises."""
