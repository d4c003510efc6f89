"""Observers that compare all processes: throughput, stragglers, timelines, and the list of a run's
callbacks.
"""
