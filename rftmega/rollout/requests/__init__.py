"""Requests for completions to engines: their content, the order in which engines begin them, and
partial completions.
"""

from rftmega.rollout.requests.request import Finished, PromptBatch, Request, Requests

__all__ = ["Finished", "PromptBatch", "Request", "Requests"]
