"""Scores and trains over micro-batches; shared by the backends."""
