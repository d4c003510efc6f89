"""Callbacks watch a training: they evaluate, write metrics and trajectories, save, and stop it."""
