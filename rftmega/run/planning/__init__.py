"""Predicts a run's memory, compute and communication from its config and config.json alone: without
processes, weights or a device.
"""
