"""Training checkpoints: the complete state that a run resumes from, written asynchronously while
training continues.
"""
