"""Prompts, answers to learn and preferences from files, in a seeded order."""

from rftmega.data.prompts import load_prompts
from rftmega.data.sampler import MixedOrder, PromptOrder, order_of
from rftmega.data.tokenizer import Tokenizer

__all__ = ["MixedOrder", "PromptOrder", "Tokenizer", "load_prompts", "order_of"]
