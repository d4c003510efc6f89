"""Distributes the requests of rollouts over all engines, and gathers the scored rollouts on every
process.
"""
