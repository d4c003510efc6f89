"""The gate between engine and trainer on the real path: faults that leave a push whole and the
engine wrong, and what it says.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rftmega.config import ParallelConfig, RolloutConfig
from rftmega.core.errors import GapExceeded
from rftmega.core.types import Prompt, Rollout, Sampling
from tests.layouts import config_of
from tests.ranks import run_ranks
from tests.rollouts import completion_of, rollout_of
from tests.tiny_models import save_tiny

PROMPTS = [Prompt((5, 9, 100)), Prompt((3,)), Prompt((7, 11)), Prompt((2, 2, 2, 2))]
EMBEDDING = "model.embed_tokens.weight"


def likes_long(prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[dict[str, float]]:
    return [{"reward": float(len(completion.response_ids))} for completion in rollouts]


def body(world: Any, folder: Path, output: Path) -> dict[str, str]:
    """What a run says of each fault, by its name; every rank."""
    import torch

    from rftmega.backends.megatron import MegatronBackend
    from rftmega.rollout.engines.transformers import TransformersEngine
    from rftmega.rollout.pool.engine_pool import EnginePool
    from rftmega.run.placement.reinforcement import ReinforcementStrategy
    from rftmega.trainer import Algorithm
    from rftmega.weights import push

    config = config_of(folder, ParallelConfig(tensor=2))
    config.rollout = RolloutConfig(
        engine="transformers",
        samples_per_prompt=3,
        temperature=0.7,
        max_prompt_tokens=8,
        max_response_tokens=6,
    )
    config.trainer.output = str(output)
    config.optimizer.learning_rate = 1e-2
    made = ReinforcementStrategy(config, world, MegatronBackend(), stop_ids=[1])
    trainer = Algorithm(config).reinforced(made, likes_long)
    trainer.weights.push(version=0)
    parameter = next(item.parameter for item in made.actor.manager.bound if item.rule.opens)
    said: dict[str, str] = {}

    def step() -> str:
        """ "": the step was taken."""
        before = [item.parameter.detach().clone() for item in made.actor.manager.bound]
        try:
            trainer.train_step(PROMPTS)
        except GapExceeded as error:
            now = [item.parameter for item in made.actor.manager.bound]
            made.phases.push()  # weights may have left the device
            assert all(torch.equal(x, y) for x, y in zip(before, now, strict=True)), (
                "nothing was learnt"
            )
            return str(error)
        return ""

    said["nothing"] = step()
    said["a second policy"] = step()

    @torch.no_grad()
    def changed_after_the_push() -> None:
        made.phases.push()
        parameter.mul_(1.5)

    changed_after_the_push()
    said["changed after the push"] = step()
    with torch.no_grad():
        made.phases.push()
        parameter.div_(1.5)

    def with_fault(name: str, owner: Any, method: str, wrong: Callable[..., Any]) -> None:
        plain = getattr(owner, method)
        setattr(owner, method, lambda *given, **named: wrong(plain, *given, **named))
        trainer.weights.push(version=trainer.step)
        said[name] = step()
        setattr(owner, method, plain)
        trainer.weights.push(version=trainer.step)

    def damaged(plain: Any, *given: Any) -> Any:
        for move, elements in plain(*given):
            if move.name == EMBEDDING:
                elements.zero_()
            yield move, elements

    with_fault("changed on its way", push, "opened", damaged)

    def swapped(plain: Any, self: Any, prompts: Any, **named: Any) -> Any:
        found = [completion_of(each) for each in plain(self, prompts, **named)]
        if len(found) == 12:
            found = [*found[3:6], *found[:3], *found[6:]]
        return [rollout_of(prompt, each) for prompt, each in zip(prompts, found, strict=True)]

    with_fault("answers at other prompts", EnginePool, "generate", swapped)

    def shifted(plain: Any, self: Any, prompts: Any, **named: Any) -> Any:
        found = [completion_of(each) for each in plain(self, prompts, **named)]
        off = [replace(each, logprobs=(*each.logprobs[1:], each.logprobs[0])) for each in found]
        return [rollout_of(prompt, each) for prompt, each in zip(prompts, off, strict=True)]

    with_fault("log-probs of the next token", EnginePool, "generate", shifted)
    with_fault(
        "no temperature",
        TransformersEngine,
        "_serve",
        lambda plain, self, requests, _: plain(self, requests, Sampling(1.0)),
    )

    @torch.no_grad()
    def repacked_wrong(plain: Any, self: Any, tensors: Any) -> None:
        plain(self, tensors)
        self.model.get_output_embeddings().weight[::2] *= 1.5

    with_fault("repacked wrong", TransformersEngine, "_load_weights", repacked_wrong)
    with torch.no_grad():
        made.local_engine.model.get_output_embeddings().weight[::2] *= 1.5
    said["changed later"] = step()
    trainer.weights.push(version=trainer.step)
    said["nothing in the end"] = step()
    trainer.gate.limits = replace_limits(trainer.gate.limits)
    said["rounding"] = step()
    made.close()
    return said


def replace_limits(limits: Any) -> Any:
    """Smaller than what float32 can do."""
    return limits._replace(percentile=1e-9, mean=1e-6)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, str]], Path]:
    folder = tmp_path_factory.mktemp("gap")
    return run_ranks(2, body, save_tiny(folder / "model", "qwen3"), folder / "out"), folder / "out"


CAUSES = {
    "changed after the push": f"Cause: weights: 1 tensor(s) were sent with other values than the trainer has: {EMBEDDING}[",
    "changed on its way": f"Cause: weights: 1 tensor(s) arrived changed: {EMBEDDING}[",
    "answers at other prompts": "Cause: tokens: ",
    "log-probs of the next token": "Cause: tokens: the engine's log-probability of each token is the trainer's of the token",
    "no temperature": "Cause: sampling transform: the engine's log-probabilities are those of temperature 1",
    "repacked wrong": "Cause: numbers: every slice arrived as the trainer holds it, another push changes nothing",
    "changed later": "Cause: weights: every slice arrived as the trainer holds it, and yet another push",
    "rounding": "Cause: numbers: rounding: nothing else differs",
}


def test_a_good_engine_passes_also_after_an_update(seen: Any) -> None:
    for rank in seen[0]:
        assert (rank["nothing"], rank["a second policy"], rank["nothing in the end"]) == (
            "",
            "",
            "",
        )


@pytest.mark.parametrize("fault", CAUSES)
def test_a_wrong_engine_stops_every_rank_before_it_learns_and_the_cause_is_named(
    fault: str, seen: Any
) -> None:
    for rank in seen[0]:
        assert CAUSES[fault] in rank[fault]
        assert "(rollout.max_logprob_gap=" in rank[fault]
        assert "(rollout.mean_logprob_gap=" in rank[fault]
    assert len({rank[fault] for rank in seen[0]}) == 1, "all ranks say the same"


def test_a_bundle_tells_the_same_cause_offline(seen: Any) -> None:
    """The last fault of the last step: rounding."""
    from rftmega.trainer.logprob_mismatch.bundle import GapBundle
    from rftmega.trainer.logprob_mismatch.causes import cause_of

    ranks, output = seen
    folders = sorted((output / "gap").iterdir())
    assert [folder.name for folder in folders] == ["step_000002", "step_000003"]
    assert all(folder.stat().st_mode & 0o077 == 0 for folder in folders), "they hold prompts"
    bundle = GapBundle.load(folders[-1])
    cause = cause_of(bundle.evidence, bundle.limits)
    assert f"Cause: {cause.kind}: {cause.why}." in ranks[0]["rounding"]
    assert (bundle.step, bundle.temperature, bundle.dtype) == (3, 0.7, "float32")
    assert bundle.config["rollout"]["engine"] == "transformers"
    names = {each.name for each in bundle.evidence.checksums}
    assert {EMBEDDING, "model.layers.0.self_attn.k_proj.weight", "model.norm.weight"} <= names
    assert all(each.intact for each in bundle.evidence.checksums)
    rows = bundle.rows
    prompts = {tuple(rows.tokens[b, : rows.prompt_lengths[b]].tolist()) for b in range(len(rows))}
    assert prompts == {prompt.token_ids for prompt in PROMPTS}
    assert set(bundle.versions[rows.mask].tolist()) == {3}
    assert json.loads((folders[-1] / "bundle.json").read_text())["format"] == 2


@pytest.mark.ranks
def test_the_replay_of_a_bundle_says_which_of_the_two_is_wrong(
    seen: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the very first step's bundle: one fault more, made here, in the engine's numbers or in the
    trainer's.
    """
    from rftmega.tools import replay
    from tests.mismatch_bundles import bundle_of_the_start

    _, output = seen
    for side, verdict in (("engine", replay.ENGINE_WRONG), ("trainer", replay.TRAINER_WRONG)):
        folder = bundle_of_the_start(output.parent / "model", output.parent / side, wrong=side)
        assert replay.main([str(folder)]) == 0
        said = capsys.readouterr().out
        assert f"which one   {verdict}" in said
        assert "cause       numbers" in said
        assert len([line for line in said.splitlines() if line.startswith("            ")]) == 10
    assert replay.main([str(output)]) == 2
    assert "holds no bundle of a gap" in capsys.readouterr().err
