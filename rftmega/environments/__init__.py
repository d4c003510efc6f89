"""Environments turn a task and a model into trajectories to learn from."""

from rftmega.environments.create import create
from rftmega.environments.given import given_environment
from rftmega.environments.single_turn import SingleTurnEnvironment

__all__ = ["SingleTurnEnvironment", "create", "given_environment"]
