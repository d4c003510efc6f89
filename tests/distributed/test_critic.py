"""The value model: its numbers are transformers', under every layout, and beside an actor of
another layout.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from rftmega.algorithms.aggregation import averaged
from rftmega.algorithms.losses import policy_loss
from rftmega.config import OptimizerConfig, ParallelConfig
from rftmega.core.types import Experience, TokenLoss, TokenValues
from rftmega.weights import Exporter
from tests.layouts import build_actor, build_critic, rows_of
from tests.ranks import RankFailure, run_ranks
from tests.tiny_models import save_tiny

ROWS = [
    [5, 9, 130, 2, 77],
    [3, 0],
    [(37 * i) % 131 for i in range(30)],
    [1, 2, 3, 4, 5, 6],
    [8],
    [7, 7, 7],
]
PROMPTS = [2, 1, 4, 3, 1, 2]
P = ParallelConfig
# At rate 1e-3 the second update overshoots (gradient norm 11, then 37), which enlarges rounding to
# 1.2e-5 on some CPUs.
OPTIMIZER = OptimizerConfig(epsilon=1e-4, learning_rate=2e-4, clip_grad=0.5)
SHARDED = replace(OPTIMIZER, distributed=True)
LAYOUTS = {
    "TP2": (2, P(tensor=2), OPTIMIZER),
    "TP2, SP": (2, P(tensor=2, sequence=True), OPTIMIZER),
    "PP2": (2, P(pipeline=2), OPTIMIZER),
    "PP2 x VPP2": (2, P(pipeline=2, virtual_pipeline=2), OPTIMIZER),
    "CP2": (2, P(context=2), OPTIMIZER),
    "DP2, distributed optimizer, overlapped": (
        2,
        P(),
        replace(SHARDED, overlap_grad_reduce=True, overlap_param_gather=True),
    ),
    "TP2 x PP2, SP": (4, P(tensor=2, pipeline=2, sequence=True), OPTIMIZER),
}
CONTAINED = ("TP2", "PP2", "TP2 x PP2, SP")  # in others; of the tied model all are compared


def save_reward_model(folder: Path, variant: str, *, bias: bool, labels: int = 1) -> Path:
    """A classifier as transformers writes it."""
    policy = save_tiny(folder / "policy", variant)
    kind = AutoModelForTokenClassification if bias else AutoModelForSequenceClassification
    model = kind.from_pretrained(policy, num_labels=labels, dtype=torch.float32)
    torch.manual_seed(5)
    for parameter in model.score.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder / "reward")
    return folder / "reward"


def square_loss(stats: TokenValues, experience: Experience) -> TokenLoss:
    """Towards the advantage, for want of returns."""
    mask = experience.mask.float()
    value = (stats.value - experience.advantage) ** 2
    return TokenLoss(
        value, mask, experience.mask.sum(), averaged({"square": value}, experience.mask)
    )


def experience_of() -> Experience:
    rows = rows_of(ROWS, PROMPTS)
    torch.manual_seed(4)
    zeros = torch.zeros(rows.mask.shape)
    target = torch.randn(rows.mask.shape) * rows.mask
    return Experience(
        rows.tokens, rows.prompt_lengths, rows.lengths, rows.mask, zeros, zeros, None, target
    )


def learn(critic: Any) -> Any:
    experience = experience_of()
    before = critic.values(experience.rows)
    metrics = [critic.step(experience, square_loss) for _ in range(3)]
    exporter = Exporter(critic.manager.shards(), critic.topology.replica_group, bucket_bytes=20_000)
    return (
        before,
        metrics,
        critic.values(experience.rows),
        {name: tensor.clone() for name, tensor in exporter},
    )


def learn_body(
    world: Any, folder: Path, parallel: ParallelConfig, optimizer: OptimizerConfig
) -> Any:
    return learn(build_critic(folder, parallel, optimizer))


def layouts_body(world: Any, folder: Path, names: list[str]) -> list[Any]:
    """What is learnt under each of LAYOUTS, one after the other."""
    return [learn_body(world, folder, *LAYOUTS[name][1:]) for name in names]


def assert_equal(found: Any, wanted: Any, case: str) -> None:
    for mine, theirs in zip(found[1], wanted[1], strict=True):
        for name, value in theirs.items():
            assert mine[name] == pytest.approx(value, rel=1e-5), (case, name)
    for place in (0, 2):
        torch.testing.assert_close(
            found[place], wanted[place], atol=1e-5, rtol=1e-5, msg=lambda m: f"{case}: {m}"
        )
    assert found[3].keys() == wanted[3].keys()
    for name, tensor in wanted[3].items():
        torch.testing.assert_close(
            found[3][name], tensor, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{case}, {n}: {m}"
        )


@pytest.mark.parametrize("bias", [False, True])
def test_values_are_those_of_a_classifier_of_transformers(bias: bool, tmp_path: Path) -> None:
    folder = save_reward_model(tmp_path, "qwen3", bias=bias)
    found, _, _, weights = run_ranks(2, learn_body, folder, P(tensor=2), OPTIMIZER)[0]
    # As a token classifier: it says a value for every token rather than for the last one.
    model = AutoModelForTokenClassification.from_pretrained(
        folder, num_labels=1, dtype=torch.float32
    )
    if not bias:
        torch.nn.init.zeros_(model.score.bias)
    for b, row in enumerate(ROWS):
        wanted = model(torch.tensor([row])).logits[0, :-1, 0].detach()
        torch.testing.assert_close(found[b, : len(row) - 1], wanted, atol=1e-5, rtol=1e-5)
        assert found[b, len(row) - 1 :].abs().sum() == 0
    assert weights.keys() == load_file(folder / "model.safetensors").keys()


@pytest.mark.parametrize("variant", ["qwen3", pytest.param("qwen2-tied", marks=pytest.mark.ranks)])
def test_three_updates_are_those_of_one_process_under_every_layout(
    variant: str, tmp_path: Path
) -> None:
    folder = save_reward_model(tmp_path, variant, bias=True)
    wanted = run_ranks(1, learn_body, folder, P(), OPTIMIZER)[0]
    assert "score.weight" in wanted[3]
    assert "lm_head.weight" not in wanted[3]
    names = [name for name in LAYOUTS if name not in CONTAINED or variant == "qwen2-tied"]
    for processes in (2, 4):
        alike = [name for name in names if LAYOUTS[name][0] == processes]
        for rank in run_ranks(processes, layouts_body, folder, alike) if alike else ():
            for name, found in zip(alike, rank, strict=True):
                assert_equal(found, wanted, name)


def test_from_a_policy_the_head_starts_at_zero_and_learns(tmp_path: Path) -> None:
    before, metrics, after, weights = run_ranks(
        1, learn_body, save_tiny(tmp_path, "qwen3"), P(), OPTIMIZER
    )[0]
    assert before.abs().max() == 0
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert after.abs().max() > 0
    assert weights["score.weight"].abs().max() > 0


def both_body(world: Any, policy: Path, reward: Path) -> Any:
    """They take turns, each in its own layout."""
    actor = build_actor(policy, P(tensor=2, pipeline=2, sequence=True), OPTIMIZER, dropout=0.1)
    critic = build_critic(reward, P(pipeline=2, virtual_pipeline=2), SHARDED)
    experience = replace(experience_of(), advantage=torch.ones(len(ROWS), 1) * experience_of().mask)
    old = actor.log_probs(experience.rows).logp
    values = critic.values(experience.rows)
    actor_metrics = actor.step(replace(experience, old_logp=old), policy_loss())
    trained = learn(critic)
    assert torch.equal(values, trained[0]), "the actor's update changed the critic"
    return actor_metrics, trained, actor.log_probs(experience.rows).logp


@pytest.mark.ranks
def test_actor_and_critic_live_in_the_same_processes_in_layouts_of_their_own(
    tmp_path: Path,
) -> None:
    reward = save_reward_model(tmp_path, "qwen3", bias=True)
    alone = run_ranks(1, learn_body, reward, P(), OPTIMIZER)[0]
    ranks = run_ranks(4, both_body, tmp_path / "policy", reward)
    for actor_metrics, trained, logp in ranks:
        assert actor_metrics == ranks[0][0]
        assert torch.equal(logp, ranks[0][2])
        assert_equal(trained, alone, "critic beside an actor")


def test_a_reward_model_with_two_labels_is_refused(tmp_path: Path) -> None:
    folder = save_reward_model(tmp_path, "qwen3", bias=False, labels=2)
    with pytest.raises(
        RankFailure, match=r"score.weight has shape \(2, 64\); config.json asks for \(1, 64\)"
    ):
        run_ranks(1, learn_body, folder, P(), OPTIMIZER)
