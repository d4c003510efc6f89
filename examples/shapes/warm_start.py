"""Trains a small Qwen2.5-VL (1 million parameters) on a few images, so that it is right some of the
time.

It is saved as an ordinary Hugging Face folder: config.json, model.safetensors, a tokenizer with one
token per character, preprocessor_config.json. At the end it prints the greedy accuracy on
eval.jsonl, and the accuracy with the next question's image: a model that uses its images is then no
better than chance, which is 20 %.
"""

import argparse
import json
import os
import random
import signal
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from tqdm import tqdm
from transformers import (
    AutoImageProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)
from transformers.utils import logging

SPECIAL = (
    "<pad>",
    "<eos>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
PAD, EOS, VISION_START, VISION_END, IMAGE, VIDEO = range(len(SPECIAL))
SYMBOLS = [*SPECIAL, *"0123456789 ?abcdefghijklmnopqrstuvwxyz"]
STEPS, BATCH, LEARNING_RATE = 95, 64, 2e-3
SIDE, PATCH, MERGE = 48, 8, 2
TOKENS = (SIDE // PATCH // MERGE) ** 2  # per image
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": MERGE,
    "size": {"shortest_edge": SIDE**2, "longest_edge": SIDE**2},  # pixels: images are not resized
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


@dataclass(frozen=True, slots=True)
class Example:
    tokens: list[int]  # of the prompt, including the image's
    answer: list[int]
    patches: Tensor  # of the image
    grid: Tensor


def tokenizer() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(SYMBOLS)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<eos>",
        extra_special_tokens={"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
    )


def untrained(seed: int = 0) -> Qwen2_5_VLForConditionalGeneration:
    torch.manual_seed(seed)
    text = {
        "vocab_size": len(SYMBOLS),
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 6, 6],
        },
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
    tower = {
        "depth": 2,
        "num_heads": 2,
        "in_channels": 3,
        "hidden_size": 64,
        "intermediate_size": 128,
        "out_hidden_size": 128,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "window_size": 32,
        "fullatt_block_indexes": [1],
    }
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config=text,
            vision_config=tower,
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            vision_start_token_id=VISION_START,
            vision_end_token_id=VISION_END,
            tie_word_embeddings=False,
        )
    )


def read(file: Path, folder: Path) -> list[Example]:
    """Returns the examples of the file, processed by the folder's tokenizer and image processor."""
    encode = PreTrainedTokenizerFast.from_pretrained(folder)
    process = AutoImageProcessor.from_pretrained(folder)
    shown = "<|vision_start|>" + "<|image_pad|>" * TOKENS + "<|vision_end|>"
    found = []
    for line in file.read_text().splitlines():
        record = json.loads(line)
        with Image.open(file.parent / record["images"][0]) as image:
            processed = process(images=[image.convert("RGB")], return_tensors="pt")
        found.append(
            Example(
                tokens=encode.encode(record["prompt"].replace("<image>", shown)),
                answer=[*encode.encode(record["label"]), EOS],
                patches=processed["pixel_values"],
                grid=processed["image_grid_thw"],
            )
        )
    return found


def train(
    model: Qwen2_5_VLForConditionalGeneration,
    examples: list[Example],
    *,
    steps: int = STEPS,
    seed: int = 0,
) -> None:
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.1
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 50, (steps - step) / 20)
    )
    shuffled = random.Random(seed)
    for _ in tqdm(range(steps), desc="warm start", unit="step"):
        inputs, targets = batch_of(shuffled.choices(examples, k=BATCH))
        optimizer.zero_grad()
        model(**inputs, labels=targets).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def batch_of(examples: list[Example]) -> tuple[dict[str, Tensor], Tensor]:
    """Returns the model's inputs and the targets [B, T]; -100 on prompt and padding."""
    width = max(len(each.tokens) + len(each.answer) for each in examples)
    tokens = torch.full((len(examples), width), PAD)
    targets = torch.full((len(examples), width), -100)
    for i, each in enumerate(examples):
        end = len(each.tokens) + len(each.answer)
        tokens[i, :end] = torch.tensor(each.tokens + each.answer)
        targets[i, len(each.tokens) : end] = torch.tensor(each.answer)
    inputs = {
        "input_ids": tokens,
        "pixel_values": torch.cat([each.patches for each in examples]),
        "image_grid_thw": torch.cat([each.grid for each in examples]),
        "mm_token_type_ids": (tokens == IMAGE).int(),
    }
    return inputs, targets


def swapped(examples: list[Example]) -> list[Example]:
    """Returns each question with the next one's image."""
    following = examples[1:] + examples[:1]
    return [
        replace(each, patches=after.patches, grid=after.grid)
        for each, after in zip(examples, following, strict=True)
    ]


@torch.no_grad()
def accuracy(model: Qwen2_5_VLForConditionalGeneration, examples: list[Example]) -> float:
    """Returns the share of examples whose most likely tokens are the answer."""
    inputs, targets = batch_of(examples)
    likeliest = model(**inputs).logits[:, :-1].argmax(-1)
    right = likeliest == targets[:, 1:]
    right |= targets[:, 1:] == -100
    return right.all(-1).float().mean().item()


def save_processing(folder: Path) -> None:
    """Writes the tokenizer and the image processor's config."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR, indent=2))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, nargs="?", default=Path("runs/shapes/data"))
    parser.add_argument("target", type=Path, nargs="?", default=Path("runs/shapes/model"))
    parser.add_argument("--steps", type=int, default=STEPS, help="0: random weights")
    given = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    save_processing(given.target)
    model = untrained()
    train(model, read(given.data / "warm_start.jsonl", given.target), steps=given.steps)
    model.save_pretrained(given.target)
    held_out = read(given.data / "eval.jsonl", given.target)
    right, astray = accuracy(model, held_out), accuracy(model, swapped(held_out))
    print(f"held-out accuracy: {right:.1%}, with the images of other questions {astray:.1%}")
