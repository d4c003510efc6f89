"""Environments turn a task and a model into trajectories to learn from."""

from rftmega.environments.agent import AgentEnvironment
from rftmega.environments.create import create, specs_of
from rftmega.environments.given import given_environment
from rftmega.environments.single_turn import SingleTurnEnvironment
from rftmega.environments.tools import ToolsEnvironment
from rftmega.environments.verifiers import VerifiersEnvironment

__all__ = [
    "AgentEnvironment",
    "SingleTurnEnvironment",
    "ToolsEnvironment",
    "VerifiersEnvironment",
    "create",
    "given_environment",
    "specs_of",
]
