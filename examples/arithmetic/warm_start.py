"""Trains a small Qwen3 (1.2 million parameters) on a few examples, so that it is right some of the
time.

It is saved as an ordinary Hugging Face folder: config.json, model.safetensors, a tokenizer with one
token per character.
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

SYMBOLS = ["<pad>", "<eos>", *"0123456789+="]
STEPS, BATCH, LEARNING_RATE = 100, 128, 2e-3


def tokenizer() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(SYMBOLS)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def train(
    examples: list[dict[str, str]],
    encode: PreTrainedTokenizerFast,
    *,
    steps: int = STEPS,
    seed: int = 0,
) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(SYMBOLS),
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
    shuffled = random.Random(seed)
    for _ in tqdm(range(steps), desc="warm start", unit="step"):
        tokens, targets = rows(shuffled.choices(examples, k=BATCH), encode)
        optimizer.zero_grad()
        model(tokens, labels=targets).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model


def rows(
    examples: list[dict[str, str]], encode: PreTrainedTokenizerFast
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tokens [B, T] and targets [B, T]; -100 on prompt and padding."""
    pairs = [
        (encode.encode(e["prompt"]), [*encode.encode(e["label"]), encode.eos_token_id])
        for e in examples
    ]
    width = max(len(prompt) + len(answer) for prompt, answer in pairs)
    tokens = torch.full((len(pairs), width), encode.pad_token_id)
    targets = torch.full((len(pairs), width), -100)
    for i, (prompt, answer) in enumerate(pairs):
        tokens[i, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        targets[i, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    return tokens, targets


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "examples", type=Path, nargs="?", default=Path("runs/demo/data/warm_start.jsonl")
    )
    parser.add_argument("target", type=Path, nargs="?", default=Path("runs/demo/model"))
    parser.add_argument("--steps", type=int, default=STEPS, help="0: random weights")
    given = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    encode = tokenizer()
    examples = [json.loads(line) for line in given.examples.read_text().splitlines()]
    train(examples, encode, steps=given.steps).save_pretrained(given.target)
    encode.save_pretrained(given.target)
