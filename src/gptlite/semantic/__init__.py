"""Caches of whole answers, in front of the model: by the exact request, and by the meaning of the question."""
