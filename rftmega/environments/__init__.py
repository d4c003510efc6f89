"""Environments turn a task and a model into trajectories to learn from."""

from rftmega.environments.agents.agent import AgentEnvironment
from rftmega.environments.agents.verifiers import VerifiersEnvironment
from rftmega.environments.create import check, create, specs_of
from rftmega.environments.given import given_environment
from rftmega.environments.single_turn import SingleTurnEnvironment
from rftmega.environments.tool_environment import ToolsEnvironment

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
