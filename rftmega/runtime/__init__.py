"""Devices, process groups, parallel layouts and other infrastructure of a run's processes."""
