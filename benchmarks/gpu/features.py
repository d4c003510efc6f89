"""Runs the whole program for a few steps of a tiny MoE, and of a tiny vision-language model."""

import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.gpu import loop
from benchmarks.gpu.sheet import Figures, Sheet
from examples.arithmetic.warm_start import SYMBOLS, tokenizer

IMAGES = loop.ROOT / "examples/shapes"


SIZES = loop.Sizes(warm_steps=60, steps=3, prompts=32, memory_fraction=0.2)
SMALL = loop.Sizes(warm_steps=2, steps=1, prompts=4, memory_fraction=0.2)


def measure(world: Any, sheet: Sheet, sizes: loop.Sizes) -> None:
    for name, work in {"MoE": experts, "images": images}.items():
        with tempfile.TemporaryDirectory() as folder:
            sheet.row(name, partial(work, Path(folder), sizes))


def experts(folder: Path, sizes: loop.Sizes) -> Figures:
    """Trains a random Qwen3-MoE, with 8 experts per layer, on the demo's sums."""
    loop.python(loop.EXAMPLE / "make_data.py", folder / "data")
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": len(SYMBOLS),
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
        "max_position_embeddings": 64,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape))
    model.save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    return loop.run(folder, "MoE", sizes, ())


def images(folder: Path, sizes: loop.Sizes) -> Figures:
    """Trains the vision-language demo."""
    begin = time.time()
    loop.python(IMAGES / "make_data.py", folder / "data")
    loop.python(
        IMAGES / "warm_start.py",
        folder / "data",
        folder / "model",
        "--steps",
        sizes.warm_steps,
    )
    took = time.time() - begin
    figures = loop.trained(
        IMAGES / "grpo.yaml",
        folder / "out",
        f"model.path={folder / 'model'}",
        f"data.train={folder / 'data/train.jsonl'}",
        f"data.evals.held_out={folder / 'data/eval.jsonl'}",
        f"data.evals.swapped={folder / 'data/swapped.jsonl'}",
        "parallel.tensor=1",
        "parallel.pipeline=1",
        f"rollout.memory_fraction={sizes.memory_fraction}",
        f"trainer.steps={sizes.steps}",
        f"trainer.prompts_per_step={sizes.prompts}",
        f"trainer.eval_every={sizes.steps}",
    )
    return {"warm_start_seconds": took, **figures}
