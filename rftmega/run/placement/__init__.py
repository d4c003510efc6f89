"""Builds a run's models and engine, and assigns them to processes and devices."""
