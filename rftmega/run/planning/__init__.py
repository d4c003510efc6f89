"""Plans what a run will hold, move and compute, from its config and config.json alone: no process,
no weights, no device.
"""
