"""Monitoring: metrics, evaluation, checkpoints, trajectories, performance of all processes, and the
list of a run's callbacks.
"""
