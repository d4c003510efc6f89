"""Everything around a run: command line, checks before it starts, the processes and the train
function.
"""
