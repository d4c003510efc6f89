"""Environments turn a task and a model into trajectories to learn from."""

from rftmega.agents.agent import AgentEnvironment
from rftmega.agents.verifiers import VerifiersEnvironment
from rftmega.environments.create import check, create, specs_of
from rftmega.environments.given import given_environment
from rftmega.environments.single_turn import SingleTurnEnvironment
from rftmega.environments.tools import ToolsEnvironment

__all__ = [
    "AgentEnvironment",
    "SingleTurnEnvironment",
    "ToolsEnvironment",
    "VerifiersEnvironment",
    "check",
    "create",
    "given_environment",
    "specs_of",
]
