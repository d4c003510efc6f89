"""Command line, pre-launch checks, process launch and the training entry points of a run."""
