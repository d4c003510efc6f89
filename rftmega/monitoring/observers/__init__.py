"""Training callbacks: evaluation, metrics, trajectories, checkpoints and health checks."""
