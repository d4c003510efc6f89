"""Devices, processes and communication of a run."""
