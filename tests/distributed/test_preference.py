"""Preference losses on both backends learn as in plain torch on the whole mini-batch, in every layout
and however rows are split into micro-batches; the reference of adapters is the base model.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from rftmega.config import AlgorithmConfig, LoRA, OptimizerConfig, ParallelConfig
from rftmega.config.options.preference import (
    DPO,
    KTO,
    ORPO,
    PreferenceIPO,
    PreferenceLoss,
    SimPO,
)
from rftmega.data.preference import Preference, with_mismatched
from rftmega.data.records.epochs import Examples
from rftmega.data.sampler import PromptOrder
from rftmega.data.supervised import Example
from rftmega.run.placement.reference_log_probs import FILE, collate_of
from rftmega.run.train import built_backend
from rftmega.trainer import Algorithm
from rftmega.trainer.preference import evaluated
from tests import plain_adapters
from tests.layouts import config_of, rows_of
from tests.plain_loop import log_probs
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny
from tests.tiny_vision import save_tiny_vision
from tests.vision_rows import PROMPTS, transformers_log_probs, vision_rows

P = ParallelConfig
OPTIMIZER = OptimizerConfig(learning_rate=4e-3, epsilon=1e-4, weight_decay=0.1, clip_grad=0.0)
# a large epsilon: what a tower learns from a tiny gradient depends on its rounding otherwise
NEARLY_PLAIN = replace(OPTIMIZER, learning_rate=2e-2, epsilon=1.0)
STEPS, UPDATES, CAP = 2, 2, 40
RANK, ALPHA = 4, 6.0
LOSSES: dict[str, PreferenceLoss] = {
    "dpo": DPO(beta=0.6, label_smoothing=0.1, nll_coef=0.3),
    "ipo": PreferenceIPO(beta=0.7),
    "simpo": SimPO(beta=1.5, gamma=0.4),
    "kto": KTO(beta=0.5, desirable_weight=1.2, undesirable_weight=0.8),
    "single": KTO(beta=0.5, desirable_weight=1.2, undesirable_weight=0.8),
    "orpo": ORPO(coef=0.8),
}
Case = tuple[str, int, ParallelConfig]
CASES: dict[str, Case] = {
    "Megatron, CP2": ("megatron", 2, P(context=2)),
    "FSDP 2": ("fsdp", 2, P()),
    "Megatron, one process": ("megatron", 1, P()),
    "Megatron, DP2": ("megatron", 2, P()),
    "Megatron, TP2": ("megatron", 2, P(tensor=2, sequence=True)),
    "Megatron, PP2 x VPP2": ("megatron", 2, P(pipeline=2, virtual_pipeline=2)),
    "Megatron, TP2 x PP2": ("megatron", 4, P(tensor=2, pipeline=2)),
    "Megatron, CP2 x PP2": ("megatron", 4, P(context=2, pipeline=2)),
    "FSDP 1": ("fsdp", 1, P()),
    "FSDP 1 x TP2": ("fsdp", 2, P(tensor=2)),
    "2 replicas": ("fsdp", 2, P(replicas=2)),
}
QUICK = [("Megatron, CP2", ("dpo", "single")), ("FSDP 2", ("kto", "orpo"))]
EXHAUSTIVE = [pytest.param(name, tuple(LOSSES), marks=pytest.mark.ranks) for name in CASES]


def example(prompt: list[int], response: list[int]) -> Example:
    return Example(tuple(prompt), tuple(response))


def examples_of(name: str) -> Examples[Preference]:
    """Six records: pairs, or single responses; two neighbours have the same prompt."""
    found = []
    for number in range(6):
        prompt = [3 + number // 2, 7, 11][: 1 + number % 3]
        chosen = [(13 * number + 5 * place) % 97 for place in range(1 + number)]
        rejected = [(29 * number + 3 * place + 1) % 97 for place in range(7 - number)]
        if name == "single":
            good = number % 3 > 0
            found.append(Preference((example(prompt, chosen if good else rejected),), (good,)))
        else:
            both = (example(prompt, chosen), example(prompt, rejected))
            found.append(Preference(both, (True, False)))
    examples = Examples(found, list(range(len(found))))
    return with_mismatched(examples) if LOSSES[name].takes_labels else examples


def learn_body(
    world: Any, folder: Path, output: Path, parallel: ParallelConfig, adapter: str, backend: str,
    names: list[str],
) -> Any:  # fmt: skip
    return {
        name: learn(world, folder, output / name, parallel, adapter, backend, name)
        for name in names
    }


def learn(
    world: Any, folder: Path, output: Path, parallel: ParallelConfig, adapter: str, backend: str,
    name: str,
) -> Any:  # fmt: skip
    lora = LoRA(rank=RANK, alpha=ALPHA, path=adapter) if adapter else None
    config = config_of(folder, parallel, OPTIMIZER, backend=backend, lora=lora, token_cap=CAP)
    config.algorithm = AlgorithmConfig(
        task="preference", preference=LOSSES[name], updates_per_epoch=UPDATES
    )
    config.data = replace(config.data, desirable_key="label" if name == "single" else "")
    config.trainer.output = str(output)
    policy, examples = built_backend(config).policy(config), examples_of(name)
    order = PromptOrder(examples, batch_size=len(examples), seed=0)
    collate = collate_of(config, policy, order, {}, world)
    trainer = Algorithm(config).preferring(policy, policy, collate)
    steps = [trainer.train_step(examples) for _ in range(STEPS)]
    held_out = evaluated(policy, trainer.loss_fn, collate(examples))
    again = evaluated(policy, trainer.loss_fn, collate_of(config, policy, order, {}, world)(examples))  # fmt: skip
    assert held_out == again, "the file has other values than those that were computed"
    assert (output / FILE).is_file() == LOSSES[name].needs_reference
    rows = [[*part.prompt_ids, *part.response_ids] for each in examples for part in each.responses]
    return [each["loss"] for each in steps], held_out, policy.log_probs(rows_of(rows)).logp


def sums(model: Any, responses: list[Example]) -> tuple[Tensor, Tensor]:
    """[B] sums of the log-probs of responses, and their lengths."""
    rows = [[*each.prompt_ids, *each.response_ids] for each in responses]
    every = log_probs(model, rows)
    own = [logp[len(each.prompt_ids) - 1 :] for logp, each in zip(every, responses, strict=True)]
    return torch.stack([x.sum() for x in own]), torch.tensor([len(x) for x in own])


def plain_loss(name: str, model: Any, base: Any, batch: list[Preference]) -> Tensor:
    """The mean loss of a mini-batch, pair by pair or response by response."""
    options, sigmoid = LOSSES[name], torch.nn.functional.logsigmoid
    parts = [part for each in batch for part in each.responses]
    logp, lengths = sums(model, parts)
    reference, _ = sums(base, parts)
    reference = reference.detach()
    found = []
    if isinstance(options, KTO):
        others = [part for each in batch for part in each.mismatched]
        baseline = (sums(model, others)[0] - sums(base, others)[0]).mean().clamp(min=0).detach()
        labels = [label for each in batch for label in each.desirable]
        for good, ratio in zip(labels, logp - reference, strict=True):
            weight = options.desirable_weight if good else options.undesirable_weight
            gap = ratio - baseline if good else baseline - ratio
            found.append(weight * (1 - torch.sigmoid(options.beta * gap)))
        return torch.stack(found).mean()
    for a in range(0, len(parts), 2):
        b = a + 1
        ratio = [logp[each] - reference[each] for each in (a, b)]
        mean = [logp[each] / lengths[each] for each in (a, b)]
        if isinstance(options, DPO):
            margin, wrong = options.beta * (ratio[0] - ratio[1]), options.label_smoothing
            own = -(1 - wrong) * sigmoid(margin) - wrong * sigmoid(-margin)
            found.append(own - options.nll_coef * mean[0])
        elif isinstance(options, PreferenceIPO):
            margin = ratio[0] / lengths[a] - ratio[1] / lengths[b]
            found.append((margin - 1 / (2 * options.beta)) ** 2)
        elif isinstance(options, SimPO):
            found.append(-sigmoid(options.beta * (mean[0] - mean[1]) - options.gamma))
        else:
            assert isinstance(options, ORPO)
            odds = [each - torch.log(1 - each.exp()) for each in mean]
            found.append(-mean[0] - options.coef * sigmoid(odds[0] - odds[1]))
    return torch.stack(found).mean()


def plain(name: str, folder: Path, make: Callable[[], Any]) -> Any:
    """Losses of the steps, and log-probs after them, of transformers and torch.optim."""
    base = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    model, examples = make(), examples_of(name)
    trained = [each for each in model.parameters() if each.requires_grad]
    groups = [
        {
            "params": [each for each in trained if (each.dim() == 1) is flat],
            "weight_decay": 0.0 if flat else OPTIMIZER.weight_decay,
        }
        for flat in (False, True)
    ]
    adam = torch.optim.AdamW(groups, OPTIMIZER.learning_rate, betas=(0.9, 0.95), eps=1e-4)
    losses = []
    for _ in range(STEPS):
        own = []
        for batch in (examples[:3], examples[3:]):
            loss = plain_loss(name, model, base, list(batch))
            adam.zero_grad()
            loss.backward()
            adam.step()
            own.append(loss.item())
        losses.append(sum(own) / len(own))
    rows = [[*part.prompt_ids, *part.response_ids] for each in examples for part in each.responses]
    with torch.no_grad():
        held_out = plain_loss(name, model, base, list(examples))
        return losses, held_out.item(), log_probs(model, rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def wanted(folder: Path) -> Callable[[str], Any]:
    def fresh() -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")

    return cache(lambda name: plain(name, folder, fresh))


def assert_alike(found: Any, wanted: Any) -> None:
    losses, held_out, logp = found
    assert losses == pytest.approx(wanted[0], rel=1e-5)
    assert held_out["loss"] == pytest.approx(wanted[1], rel=1e-5)
    assert abs(losses[0] - losses[-1]) > 1e-3, "nothing was learnt"
    for row, own in enumerate(wanted[2]):
        torch.testing.assert_close(logp[row, : len(own)], own, atol=3e-5, rtol=1e-5)


@pytest.mark.parametrize(("case", "losses"), [*QUICK, *EXHAUSTIVE])
def test_a_preference_loss_trains_as_plain_torch_on_the_whole_mini_batch(
    case: str, losses: tuple[str, ...], folder: Path, wanted: Any, tmp_path: Path
) -> None:
    backend, processes, parallel = CASES[case]
    names = list(losses)
    for found in run_ranks(processes, learn_body, folder, tmp_path, parallel, "", backend, names):
        for name, own in found.items():
            assert_alike(own, wanted(name))


@pytest.mark.parametrize("backend", ["megatron", pytest.param("fsdp", marks=pytest.mark.ranks)])
def test_adapters_are_compared_with_the_base_model(
    backend: str, folder: Path, tmp_path: Path
) -> None:
    pairs = plain_adapters.random_pairs(folder, rank=RANK)
    adapter = plain_adapters.write_pairs(tmp_path / "adapter", pairs, alpha=ALPHA)
    of_plain = plain("dpo", folder, lambda: plain_adapters.adapted(folder, pairs, alpha=ALPHA))
    output = tmp_path / "output"
    for found in run_ranks(2, learn_body, folder, output, P(), str(adapter), backend, ["dpo"]):
        assert_alike(found["dpo"], of_plain)


def rows_that_see(folder: Path) -> list[Any]:
    """Token ids, images and prompt lengths of the rows that have a response."""
    tokens, placed = vision_rows(folder)
    return [each for each in zip(tokens, placed, PROMPTS, strict=True) if len(each[0]) > each[2]][
        :4
    ]


def seen_body(
    world: Any, folder: Path, output: Path, parallel: ParallelConfig, backend: str
) -> Any:
    """The reference's sums and the losses of IPO, of pairs with images."""
    config = config_of(folder, parallel, NEARLY_PLAIN, backend=backend, token_cap=120)
    config.algorithm = AlgorithmConfig(task="preference", preference=PreferenceIPO(beta=0.7))
    config.trainer.output = str(output)
    policy = built_backend(config).policy(config)
    parts = [
        Example(tuple(ids[:prompt]), tuple(ids[prompt:]), images=own)
        for ids, own, prompt in rows_that_see(folder)
    ]
    examples = [
        Preference((parts[row], parts[row + 1]), (True, False)) for row in range(0, len(parts), 2)
    ]
    order = PromptOrder(examples, batch_size=len(examples), seed=0)
    collate = collate_of(config, policy, order, {}, world)
    trainer = Algorithm(config).preferring(policy, policy, collate)
    reference = collate(examples).rows.reference_sum
    losses = [trainer.train_step(examples)["loss"] for _ in range(STEPS)]
    return reference, losses


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("backend", "parallel"),
    [("megatron", P(pipeline=2)), ("megatron", P(context=2)), ("fsdp", P())],
)
def test_responses_to_images_are_compared_as_in_transformers(
    backend: str, parallel: ParallelConfig, tmp_path: Path
) -> None:
    folder = save_tiny_vision(tmp_path / "model", "qwen2_5_vl")
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")
    tokens, placed, prompts = zip(*rows_that_see(folder), strict=True)
    adam = torch.optim.AdamW(
        [
            {
                "params": [each for each in model.parameters() if (each.dim() == 1) is flat],
                "weight_decay": 0.0 if flat else OPTIMIZER.weight_decay,
            }
            for flat in (False, True)
        ],
        NEARLY_PLAIN.learning_rate, betas=(0.9, 0.95), eps=1.0,
    )  # fmt: skip
    reference: list[float] = []
    wanted = []
    for _ in range(STEPS):
        every = transformers_log_probs(model, list(tokens), list(placed))
        own = [logp[prompt - 1 :] for logp, prompt in zip(every, prompts, strict=True)]
        reference = reference or [x.sum().item() for x in own]
        ratios = [(x.sum() - ref) / len(x) for x, ref in zip(own, reference, strict=True)]
        pairs = zip(ratios[0::2], ratios[1::2], strict=True)
        loss = torch.stack([(a - b - 1 / 1.4) ** 2 for a, b in pairs]).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
        wanted.append(loss.item())
    for sums, losses in run_ranks(2, seen_body, folder, tmp_path / "output", parallel, backend):
        assert sums.tolist() == pytest.approx(reference, rel=1e-5)
        assert losses == pytest.approx(wanted, rel=1e-4)
        assert abs(losses[1] - losses[0]) > 1e-3, "nothing was learnt"
