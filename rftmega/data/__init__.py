"""Prompts from files, in a seeded order."""

from rftmega.data.prompts import load_prompts
from rftmega.data.sampler import PromptOrder
from rftmega.data.tokenizer import Tokenizer

__all__ = ["PromptOrder", "Tokenizer", "load_prompts"]
