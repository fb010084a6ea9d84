"""Smaller models: distillation and pruning."""
