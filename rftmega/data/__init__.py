"""Prompts, answers to learn and preferences from files, in a seeded order."""

from rftmega.data.preference import Pair, load_preferences, pair_rows
from rftmega.data.prompts import load_prompts
from rftmega.data.sampler import MixedOrder, PromptOrder, order_of
from rftmega.data.splits import given_of, prompts_of, ptx_of
from rftmega.data.supervised import Example, load_supervised, rows_of
from rftmega.data.tokenizer import Chat, Tokenizer

__all__ = [
    "Chat",
    "Example",
    "MixedOrder",
    "Pair",
    "PromptOrder",
    "Tokenizer",
    "given_of",
    "load_preferences",
    "load_prompts",
    "load_supervised",
    "order_of",
    "pair_rows",
    "prompts_of",
    "ptx_of",
    "rows_of",
]
