"""StrategyBase over several processes: collectives, and answers that come back to those who asked."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rftmega.config import ParallelConfig, RolloutConfig, RunConfig
from rftmega.core.errors import ConfigError, EngineError
from rftmega.core.types import Prompt, Rollout, Sampling
from rftmega.lightrft.naive_experience_maker import NaiveExperienceMaker
from rftmega.lightrft.padded_experience import to_experience
from rftmega.rollout.engines import EngineStatus, ScriptedEngine
from tests.layouts import config_of, rows_of
from tests.ranks import VLLM, on_ranks, run_ranks
from tests.rollouts import Wrapped
from tests.tiny_models import save_tiny
from tests.unit.lightrft.test_base import Plain

PRELOADED = VLLM

SAMPLING = {"temperature": 1.0, "seed": 3}


@on_ranks(3)
def test_collectives_take_what_each_process_holds_and_keep_its_form(world: Any) -> None:
    made = Plain(0, 1.0, 1, 1)
    gathered_tensors_stand_in_the_order_of_ranks(made, world)
    reductions_keep_the_form_and_the_argument(made, world)


def gathered_tensors_stand_in_the_order_of_ranks(made: Plain, world: Any) -> None:
    number = (2, 0, 1)[world.rank]
    rows = torch.arange(number * 2).reshape(number, 2) + 10 * world.rank
    named = {"rows": rows, "number": torch.tensor(float(world.rank))}
    found = made.all_gather(named if world.rank else dict(reversed(named.items())))
    assert found["rows"].tolist() == [[0, 1], [2, 3], [20, 21]]
    assert found["number"].tolist() == [0.0, 1.0, 2.0]
    assert made.all_gather(torch.tensor([world.rank == 1])).tolist() == [False, True, False]
    with pytest.raises(ValueError, match=r"\[\(1, 1\), \(1, 1\), \(1, 2\)\], rank by rank"):
        made.all_gather(torch.zeros(1, 2 if world.rank == 2 else 1))


def reductions_keep_the_form_and_the_argument(made: Plain, world: Any) -> None:
    x = torch.tensor([float(world.rank), -float(world.rank)])
    for op, expected, number in (
        ("mean", [1.0, -1.0], 2.0),
        ("max", [2.0, 0.0], 3),
        ("sum", [3.0, -3.0], 6),
    ):
        named = {"x": x, "number": world.rank + 1}
        found = made.all_reduce(named if world.rank else dict(reversed(named.items())), op)
        assert found["x"].tolist() == expected
        assert found["number"] == number
        assert type(found["number"]) is type(number)
    assert x.tolist() == [float(world.rank), -float(world.rank)]
    assert made.all_reduce(0.1 * (world.rank + 1)) == pytest.approx(0.2, abs=1e-15)
    assert made.all_reduce(2**53 + world.rank, "max") == 2**53 + 2
    assert made.all_reduce(torch.tensor([world.rank, 1])).tolist() == [1.0, 1.0]
    half = torch.ones(3, dtype=torch.bfloat16)
    # in bfloat16 256 + 1 is 256; whichever order they are added in, one of three begins with it
    half[world.rank] = 256.0
    half = made.all_reduce(half, "sum")
    assert half.dtype == torch.bfloat16
    assert half.tolist() == [258.0] * 3


class Recorded(ScriptedEngine):
    """Notes how many prompts each batch had."""

    def __init__(self) -> None:
        super().__init__(RolloutConfig(max_response_tokens=6), vocabulary=20, stop_ids=[1])
        self.batches: list[int] = []
        self.load_weights([], version=0)

    def _serve(self, requests: Any, sampling: Sampling) -> None:
        noted = Wrapped(requests)

        def taken(room: int) -> Any:
            found = requests.take(room)
            if found:
                self.batches.append(len(found))
            return found

        noted.take = taken
        super()._serve(noted, sampling)


PORTIONS = [[[1], [2, 2], [3]], [], [[4]], [[5], [6, 6]]]


def generate_body(world: Any) -> Any:
    return {size: generate(world, size) for size in (1, 2, 4)}


def generate(world: Any, engine_processes: int) -> Any:
    made = Plain(0, 1.0, 1, 1)
    engine = made.inference_engine = Recorded()
    made.inference_engine_type = "scripted"
    made.engine_processes = engine_processes
    completions = made.gather_and_generate(SAMPLING, PORTIONS[world.rank])
    assert engine.status is EngineStatus.SLEEPED
    engine.load_weights([], version=1)
    nobody = made.gather_and_generate(SAMPLING, [], sleep_engine=False)
    # on every process, though one has the image
    with pytest.raises(EngineError, match="reads token ids only"):
        made.gather_and_generate(SAMPLING, [[1]], all_images=["image"] if world.rank == 1 else None)
    local = made.engine_generate_local(SAMPLING, [[9]] * 4)
    return (
        completions,
        nobody,
        engine.batches[0] if engine.batches else 0,
        [each.output_token_ids for each in local],
    )


def test_every_process_gets_the_answers_to_its_own_prompts_whoever_shares_an_engine() -> None:
    alone = Plain(0, 1.0, 1, 1)
    alone.inference_engine = Recorded()
    expected = alone.gather_and_generate(SAMPLING, sum(PORTIONS, []), sleep_engine=False)
    ranks = run_ranks(4, generate_body)
    # A process without prompts, and alone with its engine, is next asked by itself: for 4.
    for size, batches in ((1, [3, 4, 1, 2]), (2, [3, 3, 3, 3]), (4, [6, 6, 6, 6])):
        found = [rank[size] for rank in ranks]
        assert [
            [each.prompt_token_ids for each in completions] for completions, *_ in found
        ] == PORTIONS
        assert [nobody for _, nobody, *_ in found] == [[]] * 4
        assert [batch for *_, batch, _ in found] == batches
        assert sum((completions for completions, *_ in found), []) == expected
        local = {str(ids) for *_, ids in found}
        assert len(local) == 4 // size, "one engine's processes draw alike, engines differently"


def likes_long(prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[dict[str, float]]:
    return [{"reward": float(len(completion.response_ids))} for completion in rollouts]


def test_experts_routes_are_refused_since_lightrfts_experiences_hold_none() -> None:
    from rftmega.lightrft.megatron_strategy import LightRFTStrategy

    built: Any = SimpleNamespace(config=RunConfig(rollout=RolloutConfig(router_replay="engine")))
    with pytest.raises(
        ConfigError, match="rollout.router_replay=engine: LightRFT's experiences ho"
    ):
        LightRFTStrategy(built)


def megatron_body(world: Any, folder: Path, output: Path) -> Any:
    from rftmega.algorithms.losses import policy_loss
    from rftmega.backends.megatron import MegatronBackend
    from rftmega.backends.megatron.training_state import adam_steps, schedule_steps
    from rftmega.lightrft.megatron_strategy import LightRFTStrategy
    from rftmega.lightrft.strategy import StrategyBase, is_actor
    from rftmega.run.placement.reinforcement import ReinforcementStrategy

    config = config_of(folder, ParallelConfig(tensor=2))
    config.algorithm.ema_beta = 0.5
    config.rollout = RolloutConfig(
        engine="scripted", tensor=2, max_prompt_tokens=8, max_response_tokens=6
    )
    made = LightRFTStrategy(ReinforcementStrategy(config, world, MegatronBackend(), stop_ids=[1]))
    assert isinstance(made, StrategyBase)
    assert made.engine_processes == 2
    assert (made.train_batch_size, made.micro_train_batch_size) == (16 * 8, 64 // 14)
    policy = made.policy
    assert is_actor(policy)
    actor = made.unwrap_model(policy)
    assert made.setup_inference_engine(made.args, "scripted", actor=policy) is made.inference_engine
    mine = [[[5, 9, 100], [3]], [[7]]][world.rank]
    completions = made.gather_and_generate({"temperature": 1.0}, mine)
    assert [each.prompt_token_ids for each in completions] == mine
    (first, *_), critic, *_ = made.prepare_models_and_optimizers(
        policy, None, [], None, made.args, max_steps=100
    )
    assert first is policy
    assert critic == (None, None, None)
    for refused in (
        lambda: made.prepare_models_and_optimizers(policy, None, [], None, made.args, max_steps=7),
        lambda: made.create_optimizer(policy, lr=1.0),
        lambda: made.setup_inference_engine(made.args, "vllm"),
        lambda: made.update_engine_weights(object()),
        lambda: made.save_ckpt(object(), str(output)),
    ):
        with pytest.raises(ValueError):
            refused()
    rows = rows_of([[5, 9, 100, 4, 4], [3, 8, 8]])
    before = policy.log_probs(rows).logp
    made.save_ckpt(
        policy, str(output), tag="a", client_state={"consumed_samples": 12, "places": {2: 1, 10: 2}}
    )
    made.update_engine_weights(actor)
    judged: list[Rollout] = []

    def watched(prompts: Any, rollouts: Any) -> Any:
        judged.extend(rollouts)
        return likes_long(prompts, rollouts)

    maker = NaiveExperienceMaker(policy, None, watched, None, None, 8, None, made)
    (experience,) = maker.make_experience_list(
        [Prompt((5, 9)), Prompt((3,))], n_samples_per_prompt=4
    )
    assert experience.sequences.shape[0] == 8
    assert policy.step(to_experience(experience), policy_loss())["skipped_steps"] == 0
    made.maybe_load_optimizer(actor.manager.optimizer)
    held = actor.manager.residency.bytes()["adam"]
    made.maybe_offload_optimizer(actor.manager.optimizer)
    assert (held > 0, actor.manager.residency.bytes()["adam"]) == (True, 0)
    assert not torch.equal(policy.log_probs(rows).logp, before)
    made.save_ckpt(policy, str(output), tag="b", max_num=1, save_latest=False)
    manager, average = actor.manager, actor.average
    trained, averaged = policy.log_probs(rows).logp, [x.clone() for x in average.held]
    made.update_engine_weights(policy)
    # and the trainer's weights leave the device
    made.gather_and_generate({}, mine, sleep_engine=False)
    # the latest that was made so
    found = made.load_ckpt(policy, str(output), load_module_only=True)
    assert torch.equal(policy.log_probs(rows).logp, before)
    assert all(
        torch.equal(x, item.parameter) for x, item in zip(average.held, manager.bound, strict=True)
    )
    assert (adam_steps(manager), schedule_steps(manager)) == (1, 1), "not of the weights"
    made.load_ckpt(policy, str(output), tag="b", load_optimizer_states=False)
    assert torch.equal(policy.log_probs(rows).logp, trained)
    assert all(torch.equal(x, y) for x, y in zip(average.held, averaged, strict=True))
    made.load_ckpt(policy, str(output), tag="a", load_lr_scheduler_states=False)
    assert (adam_steps(manager), schedule_steps(manager)) == (0, 1)
    made.load_ckpt(policy, str(output), tag="b")
    assert (adam_steps(manager), schedule_steps(manager)) == (1, 1)
    made.load_ckpt(policy, str(output), tag="a")
    assert (adam_steps(manager), schedule_steps(manager)) == (0, 0)
    assert torch.equal(policy.log_probs(rows).logp, before)
    with pytest.raises(EngineError, match="holds no weights"):
        made.engine_generate_local({}, [5])
    return found, sorted(path.name for path in output.iterdir()), len(judged)


def test_the_strategy_of_megatron_generates_saves_and_loads_under_the_names_that_users_know(
    tmp_path: Path,
) -> None:
    folder, output = save_tiny(tmp_path, "qwen3-tied"), tmp_path / "checkpoints"
    ranks = run_ranks(2, megatron_body, folder, output)
    assert [judged for *_, judged in ranks] == [8, 0], (
        "each of 8 answers is judged once, by the first process of their engine"
    )
    for (path, state), files, _ in ranks:
        assert path == str(output / "a")
        assert state == {"consumed_samples": 12, "places": {"2": 1, "10": 2}}
        assert files == ["a", "b", "latest"]
