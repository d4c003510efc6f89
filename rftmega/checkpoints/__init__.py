"""Checkpoints of a run: all that it resumes from, written beside the training."""
