"""Tiny random Qwen2-Audio folders, with a tokenizer and what a feature extractor reads."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    PreTrainedTokenizerFast,
    Qwen2AudioForConditionalGeneration,
)
from transformers.utils import logging

VOCABULARY = 131  # prime: every tensor-parallel size needs padding rows
SPECIAL = ("<pad>", "<|im_start|>", "<|im_end|>", "<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>")
PAD, IM_START, IM_END, AUDIO_START, AUDIO_END, AUDIO = range(len(SPECIAL))
WAVEFORM = "<|audio_bos|><|AUDIO|><|audio_eos|>"  # one, as a prompt's text has it
RATE, HOP, BANDS = 16000, 160, 16
SECONDS = (0.52, 1.0, 0.301)  # of `waveforms`
TEXT: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": VOCABULARY,
    "hidden_size": 128,  # 32 elements a head: vLLM takes no fewer on a CPU
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": IM_END,
    "pad_token_id": PAD,
}
TOWER: dict[str, Any] = {
    "num_mel_bins": BANDS,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "d_model": 32,
}
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    f"{{% if part['type'] == 'audio' %}}{WAVEFORM}"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tiny_audio(folder: Path, *, seconds: int = 1, seed: int = 0, **text: Any) -> Path:
    """Writes config.json, weights, a tokenizer and preprocessor_config.json; `seconds`: the window
    that waveforms fill (30 in published models, and in what vLLM takes); `text`: fields of
    text_config.

    Norms and biases are random too, and all but the sinusoids is so large that each tensor shows in
    the logits.
    """
    torch.manual_seed(seed)
    model = Qwen2AudioForConditionalGeneration(audio_config(seconds, **text)).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_positions" in name:
                parameter.copy_(0.1 * torch.randn_like(parameter))
            elif parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.mul_(4.0)
    logging.disable_progress_bar()
    save(model, folder)
    tokenizer().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor(seconds), indent=2))
    return folder


def save(model: Qwen2AudioForConditionalGeneration, folder: Path) -> None:
    """Saves a model under the names of the published folders: transformers 5.19 writes one "model."
    too many for a model that was not read from a folder.
    """
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = {
        name.replace("language_model.model.model.", "language_model.model."): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})


def audio_config(seconds: int = 1, **text: Any) -> Any:
    positions = seconds * RATE // HOP // 2
    return AutoConfig.for_model(
        "qwen2_audio",
        text_config=TEXT | text,
        audio_config=TOWER | {"max_source_positions": positions},
        audio_token_index=AUDIO,
    )


def tokenizer() -> PreTrainedTokenizerFast:
    """Returns one with a token a character of ASCII, and words that no text has up to VOCABULARY."""
    symbols = [*SPECIAL, "\n", *map(chr, range(32, 127))]
    symbols += [f"w{n}" for n in range(len(symbols), VOCABULARY)]
    vocabulary = {symbol: n for n, symbol in enumerate(symbols)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
    )


def preprocessor(seconds: int) -> dict[str, Any]:
    """Returns what preprocessor_config.json says."""
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "processor_class": "Qwen2AudioProcessor",
        "feature_size": BANDS,
        "sampling_rate": RATE,
        "hop_length": HOP,
        "chunk_length": seconds,
        "n_fft": 400,
        "padding_value": 0.0,
        "padding_side": "right",
        "dither": 0.0,
        "return_attention_mask": True,
    }


def waveforms() -> list[np.ndarray]:
    """Returns waveforms of noise and a tone, one of each of SECONDS."""
    drawn = np.random.default_rng(0)
    found = []
    for number, seconds in enumerate(SECONDS):
        at = np.arange(int(seconds * RATE)) / RATE
        tone = 0.4 * np.sin(2 * np.pi * 400 * (number + 1) * at)
        found.append((tone + 0.1 * drawn.standard_normal(len(at))).astype(np.float32))
    return found
