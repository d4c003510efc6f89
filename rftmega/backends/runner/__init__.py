"""Scoring passes and optimizer steps over micro-batches, the same for every backend."""
