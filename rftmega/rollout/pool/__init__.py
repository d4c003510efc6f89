"""Dispatch spreads the requests of a rollout over all engines and gathers the scored answers."""
