"""Monitoring: metrics, evaluation, checkpoints, trajectories, performance over all processes, and
the list of a run's callbacks.
"""
