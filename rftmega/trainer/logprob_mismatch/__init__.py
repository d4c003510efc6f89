"""Gap compares the log-probs of engine and trainer, and stops a run where they differ."""
