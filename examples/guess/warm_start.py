"""Trains a small Qwen3 (1.2 million parameters) on games with random guesses among the remaining
numbers.

It is saved as an ordinary Hugging Face folder. A token is a number, or a word of the game.
"""

import argparse
import json
import os
import random
import signal
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

WORDS = ["<pad>", "<eos>", "<", ">", *map(str, range(32))]
STEPS, BATCH, LEARNING_RATE = 200, 128, 2e-3
Game = tuple[str, list[str]]  # the prompt, and the words after it


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def train(
    games: list[Game], encode: PreTrainedTokenizerFast, *, steps: int = STEPS, seed: int = 0
) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(WORDS),
            hidden_size=160,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=64,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=encode.eos_token_id,
            pad_token_id=encode.pad_token_id,
        )
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.1
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 50, (steps - step) / 20)
    )
    drawn = random.Random(seed)
    for _ in tqdm(range(steps), desc="warm start", unit="step"):
        tokens, targets = rows(drawn.choices(games, k=BATCH), encode)
        optimizer.zero_grad()
        model(tokens, labels=targets).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model


def rows(games: list[Game], encode: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tokens [B, T] and targets [B, T]: each guess and the end token after it; -100
    elsewhere.
    """
    pairs = []
    for prompt, words in games:
        ids, said = encode.encode(prompt), [-100]
        for word in words:
            (token,) = encode.encode(word)
            if word in "<>":
                ids, said = [*ids, token], [*said, -100]
            else:
                ids, said = [*ids, token, encode.eos_token_id], [*said, token, encode.eos_token_id]
        pairs.append((ids, said))
    width = max(len(ids) for ids, _ in pairs)
    tokens = torch.full((len(pairs), width), encode.pad_token_id)
    targets = torch.full((len(pairs), width), -100)
    for row, (ids, said) in enumerate(pairs):
        tokens[row, : len(ids)] = torch.tensor(ids)
        targets[row, : len(ids)] = torch.tensor(said)
    return tokens, targets


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Path("runs/guess/data/warm_start.jsonl")
    parser.add_argument("examples", type=Path, nargs="?", default=default)
    parser.add_argument("target", type=Path, nargs="?", default=Path("runs/guess/model"))
    parser.add_argument("--steps", type=int, default=STEPS, help="0: random weights")
    given = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    encode = tokenizer()
    records = [json.loads(line) for line in given.examples.read_text().splitlines()]
    games = [(record["prompt"], record["label"].split()) for record in records]
    train(games, encode, steps=given.steps).save_pretrained(given.target)
    encode.save_pretrained(given.target)
