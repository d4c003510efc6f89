"""Requests to engines: their content, their order, and partial completions."""

from rftmega.rollout.requests.request import Finished, PromptBatch, Request, Requests

__all__ = ["Finished", "PromptBatch", "Request", "Requests"]
