"""Supervised fine-tuning: loss and gradient are transformers', with images as well."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor

from rftmega.algorithms.supervised import cross_entropy_loss
from rftmega.config import DataConfig, OptimizerConfig, ParallelConfig
from rftmega.data.media.image_processor import processor_of
from rftmega.data.media_reader import MediaOptions
from rftmega.data.supervised import Example, load_supervised, rows_of
from rftmega.data.tokenizer import Tokenizer
from rftmega.trainer.experience import given
from tests.layouts import build_actor, build_policy
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny
from tests.tiny_vision import IMAGE, IMAGE_TEXT, images, save_tiny_vision

EXAMPLES = [
    Example((5, 9), (130, 2, 77)),
    Example((3,), (0,)),
    Example(tuple(range(20)), (7,) * 9),
    Example((1, 2), (3, 4)),
]


def learn_body(world: Any, folder: Path) -> Any:
    actor = build_actor(folder, ParallelConfig(), OptimizerConfig(clip_grad=0.0), token_cap=30)
    return actor.step(given(rows_of(EXAMPLES)), cross_entropy_loss())


def test_a_step_has_the_loss_and_the_gradient_of_transformers(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "qwen3")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = sum(len(example.response_ids) for example in EXAMPLES)
    total = torch.zeros(())
    for example in EXAMPLES:
        ids = torch.tensor([example.prompt_ids + example.response_ids])
        labels = ids.clone()
        labels[:, : len(example.prompt_ids)] = -100  # transformers' mark of what is not learnt
        total = total + model(ids, labels=labels).loss * len(example.response_ids) / tokens
    total.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm().item()
    for metrics in run_ranks(2, learn_body, folder):
        assert metrics["loss"] == pytest.approx(total.item(), rel=1e-5)
        assert metrics["cross_entropy"] == metrics["loss"]
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert metrics["count"] == tokens


# question, numbers of its images, answer
SEEN = [("what<image>?", [0], "a cat"), ("none", [], "b"), ("<image>or<image>", [1, 2], "the 2nd")]


def vision_body(
    world: Any, folder: Path, data: Path, parallel: ParallelConfig, backend: str
) -> Any:
    media = MediaOptions(processor_of(folder), max_images=2)
    limits = {"max_prompt_tokens": 200, "max_response_tokens": 20}
    examples = load_supervised(data, Tokenizer(folder), DataConfig(), media=media, **limits)
    policy = build_policy(
        folder, parallel, OptimizerConfig(clip_grad=0.0), token_cap=220, backend=backend
    )
    rows = rows_of(examples)
    scored = policy.log_probs(rows).logp[rows.mask].mean().item()
    return scored, policy.step(given(rows), cross_entropy_loss())


@pytest.mark.parametrize(
    ("parallel", "backend"),
    [(ParallelConfig(tensor=2), "megatron"), (ParallelConfig(), "fsdp")],
)
def test_a_step_on_answers_about_images_has_the_loss_and_the_gradient_of_transformers(
    parallel: ParallelConfig, backend: str, tmp_path: Path
) -> None:
    folder, drawn = save_tiny_vision(tmp_path / "model", "qwen3_vl"), images()
    for number, image in enumerate(drawn):
        image.save(tmp_path / f"{number}.png")
    records = [
        {"prompt": question, "response": answer, "images": [f"{n}.png" for n in numbers]}
        for question, numbers, answer in SEEN
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")
    processor: Any = AutoProcessor.from_pretrained(folder, backend="torchvision")
    losses = []
    for question, numbers, answer in SEEN:
        shown = {"images": [drawn[n] for n in numbers]} if numbers else {}
        text = question.replace("<image>", IMAGE_TEXT) + answer + "<|im_end|>"
        inputs = dict(processor(text=[text], return_tensors="pt", **shown))
        ids = inputs["input_ids"]
        inputs["mm_token_type_ids"] = (ids == IMAGE).int()
        model.model.rope_deltas = None
        logp = model(**inputs).logits[0, :-1].log_softmax(-1)
        losses.append(-logp.gather(-1, ids[0, 1:, None])[-len(answer) - 1 :, 0])
    expected = torch.cat(losses).mean()
    expected.backward()
    gradients = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    norm = torch.stack(gradients).norm().item()
    ranks = run_ranks(2, vision_body, folder, tmp_path / "data.jsonl", parallel, backend)
    for scored, metrics in ranks:
        assert scored == pytest.approx(-expected.item(), rel=1e-5)
        assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-5)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert metrics["count"] == sum(len(answer) + 1 for *_, answer in SEEN)
