"""Mirrors the package; one process, no process group."""
