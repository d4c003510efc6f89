"""What a run will hold in memory, move and compute, from its config and config.json alone: no process, no weights, no device."""
