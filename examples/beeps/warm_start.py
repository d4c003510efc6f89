"""Trains a small Qwen2-Audio on a few recordings, so that it is right some of the time.

It is saved as an ordinary Hugging Face folder: config.json, model.safetensors, a tokenizer with one
token per character, preprocessor_config.json. Its window is 1 s, not 30, so that training takes
seconds on a laptop. At the end it prints the greedy accuracy on eval.jsonl, and the accuracy with
the next question's recording: a model that listens is then no better than chance, 25 %.
"""

import argparse
import json
import os
import random
import signal
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from tqdm import tqdm
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    WhisperFeatureExtractor,
)
from transformers.utils import logging

SPECIAL = ("<pad>", "<eos>", "<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>")
PAD, EOS, AUDIO_START, AUDIO_END, AUDIO = range(len(SPECIAL))
SYMBOLS = [*SPECIAL, *"0123456789 ?abcdefghijklmnopqrstuvwxyz"]
STEPS, BATCH, LEARNING_RATE = 120, 32, 2e-3
RATE, HOP, BANDS, SECONDS = 16000, 160, 32, 1
POSITIONS = SECONDS * RATE // HOP // 2
PREPROCESSOR = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "processor_class": "Qwen2AudioProcessor",
    "feature_size": BANDS,
    "sampling_rate": RATE,
    "hop_length": HOP,
    "chunk_length": SECONDS,
    "n_fft": 400,
    "padding_value": 0.0,
    "padding_side": "right",
    "return_attention_mask": True,
}


@dataclass(frozen=True, slots=True)
class Example:
    tokens: list[int]  # of the prompt, including the recording's
    answer: list[int]
    frames: Tensor  # [bands, 2 x positions]
    heard: Tensor  # [2 x positions]: 1 where there is sound


def tokenizer() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(SYMBOLS)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def untrained(seed: int = 0) -> Qwen2AudioForConditionalGeneration:
    torch.manual_seed(seed)
    text = {
        "model_type": "qwen2",
        "vocab_size": len(SYMBOLS),
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
    tower = {
        "num_mel_bins": BANDS,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 128,
        "d_model": 64,
        "max_source_positions": POSITIONS,
    }
    config = Qwen2AudioConfig(text_config=text, audio_config=tower, audio_token_index=AUDIO)
    model = Qwen2AudioForConditionalGeneration(config)
    with torch.no_grad():
        model.model.audio_tower.embed_positions.weight.copy_(sinusoids())
    return model


def sinusoids() -> Tensor:
    """Returns the position embeddings [P, 64] of Whisper's encoder (arXiv:2212.04356)."""
    powers = torch.arange(32) / 31
    angles = torch.arange(POSITIONS)[:, None] / 10000**powers
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def read(file: Path, folder: Path) -> list[Example]:
    """Returns the examples of the file, processed by the folder's tokenizer and feature
    extractor.
    """
    import soundfile

    encode = PreTrainedTokenizerFast.from_pretrained(folder)
    extract = WhisperFeatureExtractor.from_pretrained(folder)
    found = []
    for line in file.read_text().splitlines():
        record = json.loads(line)
        samples, _ = soundfile.read(file.parent / record["audio"][0], dtype="float32")
        made = extract(samples, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True)
        heard = made["attention_mask"][0]
        tokens = ((int(heard.sum()) - 1) // 2 - 1) // 2 + 1
        shown = "<|audio_bos|>" + "<|AUDIO|>" * tokens + "<|audio_eos|>"
        found.append(
            Example(
                tokens=encode.encode(record["prompt"].replace("<audio>", shown)),
                answer=[*encode.encode(record["label"]), EOS],
                frames=made["input_features"][0],
                heard=heard,
            )
        )
    return found


def train(
    model: Qwen2AudioForConditionalGeneration,
    examples: list[Example],
    *,
    steps: int = STEPS,
    seed: int = 0,
) -> None:
    model.model.audio_tower.embed_positions.requires_grad_(False)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.1
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 20, (steps - step) / 20)
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
        "attention_mask": (tokens != PAD).long(),
        "input_features": torch.stack([each.frames for each in examples]),
        "feature_attention_mask": torch.stack([each.heard for each in examples]),
    }
    return inputs, targets


def swapped(examples: list[Example]) -> list[Example]:
    """Returns each answer with the next question's recording and prompt tokens."""
    following = examples[1:] + examples[:1]
    return [
        replace(after, answer=each.answer) for each, after in zip(examples, following, strict=True)
    ]


@torch.no_grad()
def accuracy(model: Qwen2AudioForConditionalGeneration, examples: list[Example]) -> float:
    """Returns the share of examples whose most likely tokens are the answer."""
    inputs, targets = batch_of(examples)
    likeliest = model(**inputs).logits[:, :-1].argmax(-1)
    right = likeliest == targets[:, 1:]
    right |= targets[:, 1:] == -100
    return right.all(-1).float().mean().item()


def save(model: Qwen2AudioForConditionalGeneration, folder: Path) -> None:
    """Saves a model under the parameter names of the published folders: transformers 5.19 writes
    one "model." too many for a model that was not loaded from a folder.
    """
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = {
        name.replace("language_model.model.model.", "language_model.model."): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})


def save_processing(folder: Path) -> None:
    """Writes the tokenizer and the feature extractor's config."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR, indent=2))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, nargs="?", default=Path("runs/beeps/data"))
    parser.add_argument("target", type=Path, nargs="?", default=Path("runs/beeps/model"))
    parser.add_argument("--steps", type=int, default=STEPS, help="0: random weights")
    given = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    save_processing(given.target)
    model = untrained()
    train(model, read(given.data / "warm_start.jsonl", given.target), steps=given.steps)
    save(model, given.target)
    held_out = read(given.data / "eval.jsonl", given.target)
    right, astray = accuracy(model, held_out), accuracy(model, swapped(held_out))
    print(f"held-out accuracy: {right:.1%}, with the recordings of other questions {astray:.1%}")
