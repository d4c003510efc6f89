"""Distributes a rollout's requests over all engines and gathers the scored rollouts on every
process.
"""
