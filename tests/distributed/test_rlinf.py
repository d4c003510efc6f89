"""Actors driven by RLinf's calls take the steps of `rftmega train`."""

import asyncio
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rftmega.config import ParallelConfig, RunConfig
from rftmega.core.errors import ConfigError
from rftmega.core.types import Rollout, Sampling
from rftmega.rlinf.channel import SentRollout, check, portion
from tests.e2e.conftest import metrics_of, write_arithmetic
from tests.layouts import config_of, rows_of
from tests.ranks import VLLM, run_ranks
from tests.tiny_models import save_tiny
from tests.vision_rows import experience_of

PRELOADED = VLLM
STEPS = 2
OPTIONS = ["rollout.engine=transformers", f"trainer.steps={STEPS}", "trainer.export=true", "trainer.eval_every=0"]  # fmt: skip
COMPARED = ("loss", "grad_norm", "learning_rate", "entropy", "reference_kl")


def trained_body(world: Any, config: Path, options: list[str]) -> None:
    import train_rl
    from rftmega.runtime.parallel import process_group

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_group, "start", lambda **_: nullcontext(world))
        patch.setattr(sys, "argv", ["train_rl.py", str(config), *options])
        assert train_rl.main() == 0


def driven_body(world: Any, file: Path, options: list[str]) -> list[dict[str, Any]]:
    from rftmega.config import load
    from rftmega.data.splits import prompts_of
    from rftmega.run.train import tokenizer_of
    from rftmega.trainer.prompt_queue import PromptQueue

    config = load(file, options)
    if config.backend == "fsdp":
        from rftmega.rlinf.fsdp import EmbodiedFSDPActor

        actor: Any = EmbodiedFSDPActor(config)
    else:
        from rftmega.rlinf.megatron import MegatronActor
        from rftmega.runtime.parallel.topology import Topology

        actor = MegatronActor(config, Topology.create(config.parallel, seed=config.trainer.seed))
    actor.init_worker()
    prompts, _ = prompts_of(config, tokenizer_of(config), check=lambda prompts: None)
    supply = PromptQueue()  # numbers the prompts, which decides the seeds
    supply.source(prompts)
    found = []
    for step, batch in zip(range(STEPS), supply, strict=False):
        actor.set_global_step(step)
        actor.sync_model_to_rollout()
        sent = generated(actor, batch)[world.rank :: world.size]
        asyncio.run(received(actor, sent))
        columns = actor.compute_advantages_and_returns()
        found.append({"columns": columns, "metrics": actor.run_training()})
    actor.strategy.export(config.exported)
    actor.close()
    return found


def generated(actor: Any, batch: Any) -> list[SentRollout]:
    """What the engine says to each prompt of a step, as `rftmega train` asks it."""
    from rftmega.trainer.rollout_schedules import groups_of

    cfg = actor.cfg
    groups = groups_of(
        batch, seed=cfg.trainer.seed, samples_per_prompt=cfg.rollout.samples_per_prompt
    )
    asked = [(group, number) for group in groups for number in range(len(group.seeds))]
    rollouts = actor.strategy.engine.generate(
        [group.prompt for group, _ in asked],
        seeds=[group.seeds[number] for group, number in asked],
        sampling=Sampling(cfg.rollout.temperature),
    )
    return [
        SentRollout(place, number, group.prompt, rollout)
        for place, group in enumerate(groups)
        for number, rollout in enumerate(rollouts[place * 4 : place * 4 + 4])
    ]


async def received(actor: Any, sent: list[SentRollout]) -> None:
    """Two producers, the later rollouts first, and a channel that holds three."""
    queue: asyncio.Queue[SentRollout] = asyncio.Queue(maxsize=3)

    async def produce(own: list[SentRollout]) -> None:
        for each in reversed(own):
            await queue.put(each)

    producers = [produce(sent[::2]), produce(sent[1::2])]
    await asyncio.gather(actor.recv_rollout_trajectories(queue), *producers)


@pytest.mark.parametrize(
    ("processes", "layout"),
    [
        pytest.param(2, ["backend=fsdp"], id="fsdp", marks=pytest.mark.ranks),
        pytest.param(
            4, ["parallel.tensor=2", "parallel.pipeline=2"], id="TP2 x PP2", marks=pytest.mark.ranks
        ),
    ],
)
def test_an_actor_driven_by_its_calls_alone_takes_the_steps_of_a_run(
    processes: int, layout: list[str], tmp_path: Path
) -> None:
    write_arithmetic(tmp_path)
    file, own, theirs = tmp_path / "run.yaml", tmp_path / "own", tmp_path / "theirs"
    run_ranks(processes, trained_body, file, [*OPTIONS, *layout, f"trainer.output={own}"])
    ranks = run_ranks(processes, driven_body, file, [*OPTIONS, *layout, f"trainer.output={theirs}"])
    wanted = [line for line in metrics_of(own) if "loss" in line]
    for rank in ranks:
        assert len(rank) == len(wanted) == STEPS
        for step, line in zip(rank, wanted, strict=True):
            metrics = {name: step["metrics"][name] for name in COMPARED}
            expected = {name: line[name] for name in COMPARED}
            assert metrics == pytest.approx(expected, rel=1e-6, abs=1e-6)
            assert step["columns"]["rewards"].mean().item() == pytest.approx(line["reward"])
            names = {"advantages", "loss_mask", "prev_logprobs", "ref_logprobs", "rewards"}
            assert step["columns"].keys() == names
    weights = load_file(own / "policy/model-00001-of-00001.safetensors")
    exported = load_file(theirs / "policy/model-00001-of-00001.safetensors")
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert weights.keys() == exported.keys()
    for name, x in weights.items():
        torch.testing.assert_close(exported[name], x, rtol=0, atol=1e-6)
    assert any((x - start[name]).abs().max() > 1e-4 for name, x in weights.items()), "learnt"


def forward_body(world: Any, file: Path, options: list[str]) -> None:
    """Megatron's own schedule with the actor's closure, and the manager's own step."""
    from rftmega.config import load
    from rftmega.rlinf.megatron import MegatronActor, MegatronModelManager
    from rftmega.runtime.parallel.topology import Topology

    config = load(file, options)
    topology = Topology.create(config.parallel, seed=config.trainer.seed)
    actor = MegatronActor(config, topology)
    actor.init_worker()
    judge = MegatronActor(config, topology, role="reference")
    judge.init_worker()
    rows = rows_of([[5, 9, 7, 4, 4], [3, 8, 8]])
    scored = actor.policy.log_probs(rows).logp
    assert torch.equal(judge.policy.log_probs(rows).logp, scored)
    assert judge.optimizer is None
    experience = experience_of(rows).padded()
    step = actor.get_forward_step_func()
    actor.zero_grad()
    found = actor.run_schedule(step, [(rows, experience)] * 2, forward_only=False)
    for _, seen in found:
        assert (seen.logp.cpu() - scored).abs().max() < 1e-5
    assert len(found) == (2 if topology.is_last_stage else 0)
    assert actor.optimizer_step() == (0.0, [1e-3, 1e-3]), "all advantages are 0"
    actor.close()
    manager = MegatronModelManager(config)
    first, last = manager.model_provider_func(True, False), manager.model_provider_func(False, True)
    assert (first.pre_process, first.post_process) == (True, False)
    assert (last.pre_process, last.post_process) == (False, True)


def test_megatrons_schedule_runs_the_actors_closure_and_a_reference_only_scores(
    tmp_path: Path,
) -> None:
    write_arithmetic(tmp_path)
    options = ["parallel.pipeline=2", "trainer.export=false", f"trainer.output={tmp_path / 'out'}"]
    options += ["algorithm.entropy_coef=0", "algorithm.kl.coef=0"]
    run_ranks(2, forward_body, tmp_path / "run.yaml", options)


TOKENS = [[5, 9, 100, 4, 4, 17], [3, 8, 8], [7, 7, 21, 40]]


def manager_body(world: Any, folder: Path, output: Path) -> dict[str, Any]:
    """A loop with the manager alone, whose loss is the mean of this process's log-probs."""
    from rftmega.rlinf.fsdp import FSDPModelManager

    class Touched(FSDPModelManager):
        """A user's own model: here the same, and it says that it was asked for."""

        def model_provider_func(self) -> Any:
            self.touched = True
            return super().model_provider_func()

    config = config_of(folder, ParallelConfig(), backend="fsdp")
    config.optimizer.warmup_steps, config.optimizer.clip_grad = 3, 0.0
    config.optimizer.epsilon = 1e-4  # no sign of a gradient near 0
    with pytest.raises(ValueError, match="the process group says world_size=2"):
        FSDPModelManager(config, world.size + 1, world.rank)
    manager = FSDPModelManager(config, world.size, world.rank)
    manager.setup_model_and_optimizer()
    assert not manager.grad_scaler.is_enabled()
    counts = exchanges(manager)
    steps = [one_step(manager, world.rank) for _ in range(2)]
    manager.save_checkpoint(output, step=2)
    whole = manager.get_model_state_dict(cpu_offload=True, full_state_dict=True)
    again = Touched(config, world.size, world.rank)
    again.setup_model_and_optimizer()
    again.load_checkpoint(output)
    refused(again)
    assert again.touched
    scaled = again.build_grad_scaler(True, init_scale=1024.0)
    again.grad_scaler = scaled
    following = [one_step(each, world.rank) for each in (manager, again)]
    held = manager.get_model_state_dict(cpu_offload=False, full_state_dict=False)
    copied = manager.get_model_state_dict(cpu_offload=True, full_state_dict=False)
    own = {weight.name: weight.rows for weight in manager.trained}
    assert all(held[name].data_ptr() == rows.data_ptr() for name, rows in own.items())
    assert all(copied[name].data_ptr() != rows.data_ptr() for name, rows in own.items())
    moved(manager)
    everywhere = manager.get_model_state_dict(cpu_offload=False, full_state_dict=True)
    return {
        "counts": counts, "steps": steps, "whole": whole, "following": following,
        "names": (set(held), set(everywhere)),
    }  # fmt: skip


def one_step(manager: Any, rank: int) -> tuple[float, list[float]]:
    for number in range(2):
        with manager.before_micro_batch(manager.network, number == 1):
            loss_of(manager, number, rank).backward()
    found: tuple[float, list[float]] = manager.optimizer_step()
    return found


def loss_of(manager: Any, number: int, rank: int) -> torch.Tensor:
    """Minus the mean log-prob of one row's targets."""
    from rftmega.backends.fsdp.runner import FSDPRunner
    from rftmega.backends.runner.model_runner import MicroBatch
    from rftmega.core.types import TokenStats

    rows = rows_of([TOKENS[(number + rank) % 3]])
    stats = FSDPRunner(manager, TokenStats)._forward(MicroBatch(rows, 1.0))
    return manager.grad_scaler.scale(-stats.logp[0, : int(rows.lengths[0]) - 1].mean())


def exchanges(manager: Any) -> list[int]:
    """How many times gradients were exchanged in each of two micro-batches."""
    count = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("reduce_scatter_single", "all_reduce"):
            real = getattr(dist, name)
            patch.setattr(
                dist, name, lambda *a, real=real, **k: (count.append(1), real(*a, **k))[1]
            )
        seen = []
        for number in range(2):
            before = len(count)
            with manager.before_micro_batch(manager.network, number == 1):
                loss_of(manager, number, 0).backward()
            seen.append(len(count) - before)
    manager.zero_grad()
    return seen


def refused(manager: Any) -> None:
    for call, why in (
        (lambda: manager.build_optimizer(torch.nn.Linear(2, 2)), "not this manager's model"),
        (lambda: manager.build_optimizer(manager.model, enable_critic_warmup=True), "critic.warmu"),
        (lambda: manager.load_optimizer("cuda:1"), "this process computes on cpu"),
        (lambda: manager.load_param_and_grad(3), "this process computes on cpu"),
    ):
        with pytest.raises(ValueError, match=why):
            call()
    optimizer = manager.build_optimizer(manager.model)
    scheduler = manager.build_lr_scheduler(optimizer, manager.cfg.optimizer)
    rates = []
    for _ in range(4):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3, 1e-3], rel=1e-12)
    assert manager.model_provider_func().config == manager.model.config


def moved(manager: Any) -> None:
    before = manager.residency.bytes()
    assert before["parameters"] > 0
    assert before["adam"] > 0
    manager.offload_param_and_grad(offload_grad=True)
    manager.offload_optimizer()
    assert not any(manager.residency.bytes().values())
    manager.load_param_and_grad(0, load_grad=True)
    manager.load_optimizer(torch.device("cpu"))
    assert manager.residency.bytes() == before


def test_a_loop_with_the_managers_calls_learns_as_plain_torch_from_the_mean_over_processes(
    tmp_path: Path,
) -> None:
    folder = save_tiny(tmp_path / "model", "qwen2-tied")
    ranks = run_ranks(2, manager_body, folder, tmp_path / "checkpoints")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    named = list(model.named_parameters())
    exempt = [x for name, x in named if x.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": [x for _, x in named if x.dim() > 1]}, {"params": exempt, "weight_decay": 0.0}],
        lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01, eps=1e-4,
    )  # fmt: skip
    config = config_of(folder, ParallelConfig(), backend="fsdp").optimizer
    assert (config.beta1, config.beta2, config.weight_decay) == (0.9, 0.95, 0.01)
    for step in range(2):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (step + 1) / 3
        optimizer.zero_grad()
        for rank in range(2):
            for number in range(2):
                ids = torch.tensor([TOKENS[(number + rank) % 3]])
                logp = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
                (-logp.mean() / 2).backward()
        norm = torch.stack([x.grad.square().sum() for _, x in named]).sum().sqrt().item()
        optimizer.step()
        for found in ranks:
            assert found["steps"][step][0] == pytest.approx(norm, rel=1e-5)
            assert found["steps"][step][1] == pytest.approx([1e-3 * (step + 1) / 3] * 2)
    first, second = ranks
    assert second["whole"] == {}, "the first process's host holds the whole model"
    expected = model.state_dict()
    assert first["whole"].keys() == expected.keys() - {"lm_head.weight"}
    (elsewhere,) = run_ranks(1, alone_body, folder, tmp_path / "checkpoints")
    for name, x in first["whole"].items():
        assert torch.equal(elsewhere[name], x), "read in another layout"
        torch.testing.assert_close(
            x, expected[name], rtol=0, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}"
        )
    for found in ranks:
        silent, last = found["counts"]
        assert silent == 0, "gradients are exchanged after the last micro-batch only"
        assert last > 0
        own, again = found["following"]
        assert again[0] == pytest.approx(own[0], rel=1e-6), "the scale is removed"
        assert again[1] == own[1]
        assert all(names == set(first["whole"]) for names in found["names"])


def alone_body(world: Any, folder: Path, output: Path) -> dict[str, torch.Tensor]:
    from rftmega.rlinf.fsdp import FSDPModelManager

    manager = FSDPModelManager(config_of(folder, ParallelConfig(), backend="fsdp"), 1, 0)
    manager.setup_model_and_optimizer()
    manager.load_checkpoint(output)
    assert (manager.adam_steps, manager.schedule_steps) == (2, 2)
    return manager.get_model_state_dict(cpu_offload=True, full_state_dict=True)


@pytest.mark.parametrize(
    "option",
    [
        {"trainer": {"max_staleness": 2}},
        {"algorithm": {"dynamic_sampling": {"max_rounds": 1}}},
        {"algorithm": {"replay": {"max_age": 1}}},
        {"data": {"ptx": "texts.jsonl"}},
    ],
)
def test_options_of_the_training_loop_are_refused_by_name(option: Any) -> None:
    from rftmega.rlinf.fsdp import EmbodiedFSDPActor

    config, name = RunConfig(), []
    section, value = config, option
    while isinstance(value, dict):
        ((key, value),) = value.items()
        name.append(key)
        if isinstance(value, dict):
            section = getattr(section, key)
    setattr(section, name[-1], value)
    with pytest.raises(ConfigError, match=f"{'.'.join(name)}={value}"):
        EmbodiedFSDPActor(config)


def sent(group: int, number: int, version: int = 3) -> SentRollout:
    from rftmega.core.types import Completion, Prompt, Trajectory

    completion = Completion([4, 5], [-0.5, -0.25], "stop", version)
    return SentRollout(group, number, Prompt((1, 2)), Rollout((Trajectory.of([1, 2], completion),)))


def test_rollouts_that_are_not_whole_groups_of_the_present_weights_are_refused() -> None:
    whole = [sent(group, number) for group in (0, 4) for number in (0, 1)]
    check(whole, size=2, step=3)
    for received_, why in (
        (whole[:-1], r"Group 4 has the rollouts \[0\].* from 0 to 1, each once"),
        ([*whole, sent(4, 1)], r"Group 4 has the rollouts \[0, 1, 1\]"),
        ([sent(0, 0), sent(0, 1, version=2)], r"versions \[2, 3\] at global step 3: call set_glo"),
    ):
        with pytest.raises(ValueError, match=why):
            check(received_, size=2, step=3)


def test_portions_differ_by_one_at_most_and_add_up() -> None:
    for size in (1, 2, 3, 7):
        portions = [portion(20, rank, size) for rank in range(size)]
        assert sum(portions) == 20
        assert max(portions) - min(portions) <= 1
