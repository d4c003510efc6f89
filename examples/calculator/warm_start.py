"""Trains a small Qwen3 (1.2 million parameters) on a few conversations, in some of which it calls a
calculator. In the others it answers directly, which it is too small to do correctly.

It is saved as an ordinary Hugging Face folder, with a chat template that lists the tools. A token
is a character, or a fixed part of a call.
"""

import argparse
import json
import os
import random
import signal
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

SYMBOLS = ["<pad>", *"0123456789*=\n"]
END = "<|im_end|>"
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "'
CALLED = '"}}\n</tool_call>'
WORDS = [END, "<|im_start|>", "system", "user", "assistant", "tool", "calculate", CALL, CALLED]
TEMPLATE = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool.function.name }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{{ message.content or "" }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CALLS = 0.2  # share of the conversations in which the calculator is called
STEPS, BATCH, LEARNING_RATE = 200, 64, 2e-3
Row = tuple[list[int], list[bool]]


def tokenizer() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(SYMBOLS)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    special = [word for word in WORDS if word.startswith("<|")]
    inner.add_special_tokens([AddedToken(word, special=True) for word in special])
    inner.add_tokens([AddedToken(word, normalized=False) for word in WORDS if word not in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token=END, chat_template=TEMPLATE
    )


def conversation(record: dict[str, str], encode: PreTrainedTokenizerFast, *, calls: bool) -> Row:
    """Returns the tokens of a whole conversation, and a mask of those that the model generates."""
    question, answer = record["prompt"], f"={record['label']}{END}"
    start = f"<|im_start|>system\ncalculate{END}\n<|im_start|>user\n{question}{END}\n"
    parts = [(f"{start}<|im_start|>assistant\n", False)]
    if calls:
        parts.append((f"{CALL}{question}{CALLED}{END}", True))
        reply = f"\n<|im_start|>tool\n{record['label']}{END}\n<|im_start|>assistant\n"
        parts.append((reply, False))
    parts.append((answer, True))
    ids: list[int] = []
    said: list[bool] = []
    for text, own in parts:
        tokens = encode.encode(text)
        ids += tokens
        said += [own] * len(tokens)
    return ids, said


def train(
    records: list[dict[str, str]],
    encode: PreTrainedTokenizerFast,
    *,
    steps: int = STEPS,
    seed: int = 0,
) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(encode),
            hidden_size=160,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=128,
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
        chosen = drawn.choices(records, k=BATCH)
        rows = [conversation(each, encode, calls=drawn.random() < CALLS) for each in chosen]
        tokens, targets = padded(rows, encode.pad_token_id)
        optimizer.zero_grad()
        model(tokens, labels=targets).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model


def padded(rows: list[Row], padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tokens [B, T] and targets [B, T]; -100 on tokens that the model does not generate."""
    width = max(len(ids) for ids, _ in rows)
    tokens = torch.full((len(rows), width), padding)
    targets = torch.full((len(rows), width), -100)
    for row, (ids, said) in enumerate(rows):
        tokens[row, : len(ids)] = torch.tensor(ids)
        targets[row, : len(ids)] = torch.where(torch.tensor(said), torch.tensor(ids), -100)
    return tokens, targets


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Path("runs/calculator/data/warm_start.jsonl")
    parser.add_argument("examples", type=Path, nargs="?", default=default)
    parser.add_argument("target", type=Path, nargs="?", default=Path("runs/calculator/model"))
    parser.add_argument("--steps", type=int, default=STEPS, help="0: random weights")
    given = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    encode = tokenizer()
    records = [json.loads(line) for line in given.examples.read_text().splitlines()]
    train(records, encode, steps=given.steps).save_pretrained(given.target)
    encode.save_pretrained(given.target)
