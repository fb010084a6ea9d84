"""Serving: many requests at once, each with its own length, seed, stop strings and client."""
