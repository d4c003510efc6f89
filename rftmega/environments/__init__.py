"""Environments run a task with a model and return trajectories to train on.

Input: a task and a `Model` that completes token ids. Output: rollouts of one or several turns.
Start reading: single_turn.py, then tool_environment.py. create.py selects the environment by the
run's options.
"""
