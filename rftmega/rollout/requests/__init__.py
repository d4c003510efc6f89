"""The requests room says what engines are asked, and in which order."""

from rftmega.rollout.requests.request import Finished, PromptBatch, Request, Requests

__all__ = ["Finished", "PromptBatch", "Request", "Requests"]
