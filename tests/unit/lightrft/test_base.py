"""StrategyBase in one process, without and with a process group of one."""

import inspect
import random
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

from rftmega.config import RolloutConfig
from rftmega.core.errors import EngineError
from rftmega.core.types import Sampling
from rftmega.lightrft.strategy import EngineStatus, StrategyBase, is_actor
from rftmega.rollout.engines import ScriptedEngine
from rftmega.rollout.engines import base as rollout_base
from rftmega.runtime import device


class Plain(StrategyBase):
    """The abstract methods, of a torch module and optimizer."""

    def create_optimizer(self, model: Any, **kwargs: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def backward(self, loss: Any, model: Any, optimizer: Any, **kwargs: Any) -> None: ...

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None: ...

    def save_ckpt(self, *args: Any, **kwargs: Any) -> None: ...

    def load_ckpt(self, *args: Any, **kwargs: Any) -> Any: ...

    def _build_engine(self, args: Any, engine_type: str) -> ScriptedEngine:
        return ScriptedEngine(RolloutConfig(max_response_tokens=6), vocabulary=20, stop_ids=[1])

    def update_engine_weights(self, actor: Any) -> None:
        assert self.inference_engine is not None
        self.inference_engine.load_weights([], version=7)


def strategy(**args: Any) -> Plain:
    return Plain(3, 1.0, 2, 8, SimpleNamespace(**args))


def with_engine(**args: Any) -> Plain:
    made = strategy(**args)
    made.setup_inference_engine(None, "scripted", actor=object())
    return made


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


SIGNATURES = {
    "__init__": "(self, seed, max_norm, micro_train_batch_size, train_batch_size, args=None)",
    "_build_multimodal_inputs": "(all_prompts, all_images, images_num, all_videos, videos_num)",
    "all_reduce": "(self, data, op='mean')",
    "backward": "(self, loss, model, optimizer, **kwargs)",
    "create_optimizer": "(self, model, **kwargs)",
    "optimizer_step": "(self, optimizer, model, scheduler, name='model', **kwargs)",
    "save_ckpt": "(self, model, save_dir, tag=None, max_num=3, max_mem=1000, client_state=None, save_latest=True)",
    "load_ckpt": "(self, model, load_dir, tag=None, load_module_strict=True, load_optimizer_states=True, "
    "load_lr_scheduler_states=True, load_module_only=False)",
    "engine_generate_local": "(self, sampling_params, prompt_token_ids=None, multi_modal_inputs=None)",
    "gather_and_generate": "(self, sampling_params, all_prompt_token_ids=None, all_prompts=None, all_images=None, "
    "sleep_engine=True, images_num=None, all_videos=None, videos_num=None)",
    "get_rank": "(self)",
    "is_rank_0": "()",
    "maybe_load_optimizer": "(self, optimizer, device=None)",
    "maybe_offload_optimizer": "(self, optimizer)",
    "prepare": "(self, *models_or_pairs, is_rlhf=False)",
    "prepare_models_and_optimizers": "(self, actor, critic, reward_models, initial_model, args, max_steps)",
    "print": "(*msg)",
    "report_memory": "(prefix='')",
    "sync_and_clear_cache": "()",
    "set_seed": "(self, seed)",
    "setup_dataloader": "(self, replay_buffer, batch_size, pin_memory=False, shuffle=True, collate_fn=None, drop_last=True, "
    "sampler=None, consumed_samples=0)",
    "setup_distributed": "(self, timeout=None, num_gpu_per_node=8)",
    "setup_inference_engine": "(self, args, engine_type='vllm', actor=None)",
    "unwrap_model": "(self, model)",
    "update_engine_weights": "(self, actor)",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_methods_take_what_users_of_lightrft_give(name: str) -> None:
    signature = inspect.signature(getattr(StrategyBase, name))
    bare = [
        each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()
    ]
    assert (
        str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
        == SIGNATURES[name]
    )


def test_there_is_one_engine_status_with_the_numbers_that_users_know() -> None:
    assert EngineStatus is rollout_base.EngineStatus
    assert (EngineStatus.SLEEPED.value, EngineStatus.WAKEUP.value) == (0, 1)


# Collectives.


@pytest.mark.parametrize("joined", [False, True])
def test_alone_a_collective_gives_back_what_it_got_in_the_same_form(
    joined: bool, request: pytest.FixtureRequest
) -> None:
    if joined:
        request.getfixturevalue("alone")
    made = strategy()
    x = torch.tensor([[1, 2], [3, 4]])
    assert made.all_gather(x).tolist() == x.tolist()
    assert made.all_gather({"a": x, "b": torch.tensor(5.0)})["b"].tolist() == [5.0]
    assert made.all_gather(torch.zeros(0, 3)).shape == (0, 3)
    for op in ("mean", "max", "sum"):
        for value in (3, 2.5, -4):
            found = made.all_reduce(value, op)
            assert found == value
            assert type(found) is (float if op == "mean" else type(value))
        found = made.all_reduce({"loss": torch.tensor([1.5, -2.0]), "rows": 4}, op)
        assert found["loss"].tolist() == [1.5, -2.0]
        assert found["rows"] == 4
        assert list(found) == ["loss", "rows"]
    assert made.all_reduce(torch.tensor([1, 2])).tolist() == [1.0, 2.0]
    assert made.all_reduce(torch.tensor([True, False]), "max").tolist() == [True, False]
    assert made.all_reduce(torch.tensor([1.0], dtype=torch.bfloat16), "sum").dtype == torch.bfloat16


@pytest.mark.parametrize("data", [1.0, torch.ones(2), {"a": 1.0}, {}])
def test_an_unknown_reduction_is_refused(data: Any) -> None:
    with pytest.raises(AssertionError, match="op='min' is not one of mean, max, sum"):
        strategy().all_reduce(data, "min")


# Processes.


def test_without_a_launcher_nothing_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(
        RuntimeError, match="WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT must be set"
    ):
        strategy(engine_type="scripted").setup_distributed()
    with pytest.raises(ValueError, match="'sglang' is not supported"):
        strategy(engine_type="sglang").setup_distributed()
    assert strategy().get_rank() == 0
    assert StrategyBase.is_rank_0()


def test_a_launched_process_joins_once_and_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launched = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    threads = torch.get_num_threads()
    made = strategy()
    made.setup_distributed(timeout=timedelta(seconds=20))
    try:
        one = torch.rand(()).item()
        made.setup_distributed()  # a second time: seeds only
        assert torch.rand(()).item() == one
        assert (made.get_rank(), dist.get_world_size()) == (0, 1)
    finally:
        made._joined.close()
        torch.set_num_threads(threads)
    assert not dist.is_initialized()


def test_a_seed_covers_python_numpy_and_torch() -> None:
    drawn = []
    for seed in (5, 6, 5):
        strategy().set_seed(seed)
        drawn.append((random.random(), float(numpy.random.rand()), float(torch.rand(()))))
    assert drawn[0] == drawn[2]
    assert all(a != b for a, b in zip(drawn[0], drawn[1], strict=True))


def test_the_device_is_waited_for_then_the_processes_then_memory_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(device.CPU, "synchronize", lambda self: said.append("device"))
    monkeypatch.setattr(device.CPU, "release_unused", lambda self: said.append("memory"))
    monkeypatch.setattr(device, "current", device.CPU)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "barrier", lambda: said.append("processes"))
    StrategyBase.sync_and_clear_cache()
    assert said == ["device", "processes", "memory"]


def test_lines_have_a_time_and_memory_is_told_in_mib(capsys: pytest.CaptureFixture[str]) -> None:
    StrategyBase.print("loss", 0.5)
    assert re.fullmatch(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] loss 0.5\n", capsys.readouterr().out)
    with strategy().init_model_context():
        assert not capsys.readouterr().out
    assert re.search(r"\] models built: \w+ [\d.]+ MiB", capsys.readouterr().out)


# Models.


def test_prepared_models_keep_their_structure() -> None:
    model, other, optimizer = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1), object()
    made = strategy()
    assert made.prepare(model) is model
    assert made.prepare((model, optimizer)) == (model, optimizer)
    assert made.prepare((model, optimizer), other, is_rlhf=True) == [(model, optimizer), other]
    assert made.is_rlhf


def test_models_come_back_with_their_optimizers_and_a_missing_critic_with_none() -> None:
    model = torch.nn.Linear(1, 1)
    actor, critic, rewards, initial = strategy().prepare_models_and_optimizers(
        model, None, ["r"], "i", None, 10
    )
    assert actor[0] is model
    assert actor[1].param_groups[0]["params"] == list(model.parameters())
    assert critic == (None, None, None)
    assert (rewards, initial) == (["r"], "i")


class Wrapped:
    def __init__(self, module: Any):
        self.module = module


def test_wrappers_come_off_and_only_policies_are_actors() -> None:
    policy, critic = SimpleNamespace(log_probs=print), SimpleNamespace(values=print)
    assert strategy().unwrap_model(Wrapped(Wrapped(policy))) is policy
    assert is_actor(policy)
    assert is_actor(Wrapped(Wrapped(policy)))
    assert not is_actor(Wrapped(critic))
    assert not is_actor(None)


# Data.


@pytest.mark.parametrize(("shuffle", "drop_last"), [(True, True), (True, False), (False, True)])
def test_a_loader_goes_on_where_another_stopped_whichever_epoch_that_was(
    shuffle: bool, drop_last: bool
) -> None:
    buffer = [10 * i for i in range(11)]

    def batches(consumed: int, epochs: int) -> list[list[int]]:
        loader = strategy().setup_dataloader(
            buffer,
            4,
            shuffle=shuffle,
            drop_last=drop_last,
            consumed_samples=consumed,
            collate_fn=list,
        )
        return [batch for _ in range(epochs) for batch in loader]

    whole = batches(0, 3)
    a_epoch = 2 if drop_last else 3
    assert [len(batch) for batch in whole] == ([4, 4] if drop_last else [4, 4, 3]) * 3
    assert all(
        len(set(sum(whole[i * a_epoch : (i + 1) * a_epoch], []))) == (8 if drop_last else 11)
        for i in range(3)
    )
    assert (whole[:a_epoch] == whole[a_epoch : 2 * a_epoch]) is not shuffle
    for done in range(2 * a_epoch):
        rest = batches(sum(map(len, whole[:done])), 3)
        assert rest[: len(whole) - done] == whole[done:]


def test_a_sampler_of_ones_own_decides_the_order_and_where_it_starts() -> None:
    loader = strategy().setup_dataloader(
        [5, 6, 7, 8], 2, sampler=[3, 1, 0], drop_last=False, collate_fn=list
    )
    assert list(loader) == [[8, 6], [5]]
    with pytest.raises(ValueError, match="consumed_samples=2 with a sampler of your own"):
        strategy().setup_dataloader([5, 6], 1, sampler=[1], consumed_samples=2)


# Engines.


def test_an_engine_is_built_pushed_to_put_to_sleep_and_woken() -> None:
    made = with_engine()
    engine = made.inference_engine
    assert engine is not None
    assert engine.version == 7
    made.maybe_sleep_inference_engine()
    assert engine.status is EngineStatus.SLEEPED
    made.wakeup_inference_engine()
    assert engine.status is EngineStatus.WAKEUP


def test_memory_is_cleared_after_a_sleep_and_before_a_waking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(
        Plain, "sync_and_clear_cache", classmethod(lambda cls: said.append("clear"))
    )
    made = with_engine()
    made.inference_engine = SimpleNamespace(
        sleep=lambda: said.append("sleep"), wake=lambda: said.append("wake")
    )  # type: ignore[assignment]
    made.maybe_sleep_inference_engine()
    made.wakeup_inference_engine()
    assert said == ["sleep", "clear", "clear", "wake"]


def test_an_engine_sleeps_only_if_there_is_one_and_it_may() -> None:
    strategy().maybe_sleep_inference_engine()
    made = with_engine(enable_engine_sleep=False)
    made.maybe_sleep_inference_engine()
    assert made.inference_engine is not None
    assert made.inference_engine.status is EngineStatus.WAKEUP


def test_an_unknown_kind_of_engine_is_refused_everywhere() -> None:
    made = with_engine()
    made.inference_engine_type = "tgi"
    for call in (
        made.maybe_sleep_inference_engine,
        made.wakeup_inference_engine,
        lambda: made.setup_inference_engine(None, "tgi"),
    ):
        with pytest.raises(ValueError, match="Engine type 'tgi' is not supported"):
            call()


SAMPLING = {"temperature": 1.0, "max_tokens": 6}


def test_one_prompt_or_several_are_answered_with_ids_under_both_kinds_of_access() -> None:
    (one,) = with_engine().engine_generate_local(SAMPLING, [4, 5])
    assert one.prompt_token_ids == one["prompt_token_ids"] == [4, 5]
    assert one.output_token_ids == one["output_token_ids"]
    assert len(one.logprobs) == len(one.output_token_ids)
    with pytest.raises(AttributeError):
        _ = one.text
    several = with_engine().engine_generate_local(SAMPLING, [[4, 5], [6]])
    assert [each.prompt_token_ids for each in several] == [[4, 5], [6]]
    assert several[0] == one
    assert with_engine().engine_generate_local(SAMPLING, []) == []


def test_prompts_are_given_exactly_once() -> None:
    for given in ({}, {"prompt_token_ids": [1], "multi_modal_inputs": [{"prompt": "x"}]}):
        with pytest.raises(ValueError, match="exactly one"):
            with_engine().engine_generate_local(SAMPLING, **given)


def test_calls_draw_differently_unless_a_seed_is_given() -> None:
    made = with_engine()
    drawn = [
        [each.output_token_ids for each in made.engine_generate_local(SAMPLING, [[4]] * 4)]
        for _ in range(2)
    ]
    assert drawn[0] != drawn[1]
    assert len({str(ids) for ids in drawn[0]}) > 1, "siblings draw differently"
    seeded = [made.engine_generate_local({**SAMPLING, "seed": 5}, [[4]] * 4) for _ in range(2)]
    assert seeded[0] == seeded[1]


class Words:
    def encode(self, text: str, *, chat_template: bool) -> tuple[int, ...]:
        return tuple(map(len, text.split()))


def test_texts_go_through_the_tokenizer_and_images_are_refused_by_an_engine_of_words() -> None:
    made = with_engine()
    with pytest.raises(ValueError, match="no tokenizer"):
        made.gather_and_generate(SAMPLING, all_prompts=["a bb"])
    made.tokenizer = Words()
    found = made.gather_and_generate(
        SAMPLING, all_prompts=["a bb", "ccc"], all_images=[None, None], sleep_engine=False
    )
    assert [each.prompt_token_ids for each in found] == [[1, 2], [3]]
    (local,) = made.engine_generate_local(SAMPLING, multi_modal_inputs=[{"prompt": "a bb"}])
    assert local.prompt_token_ids == [1, 2]
    with pytest.raises(EngineError, match="ScriptedEngine reads token ids only"):
        made.gather_and_generate(
            SAMPLING, all_prompts=["a", "b"], all_images=["image"], images_num=[0, 1]
        )
    with pytest.raises(EngineError, match="images or videos among the prompts"):
        made.gather_and_generate(SAMPLING, all_prompt_token_ids=[[1]], all_videos=["film"])
    with pytest.raises(EngineError, match="reads token ids only"):
        made.engine_generate_local(
            SAMPLING, multi_modal_inputs=[{"prompt": "a", "multi_modal_data": {"image": ["x"]}}]
        )


def test_generating_needs_an_engine_and_prompts() -> None:
    for call in (strategy().gather_and_generate, strategy().engine_generate_local):
        with pytest.raises(NotImplementedError, match="call setup_inference_engine"):
            call(SAMPLING, [[1]])
    with pytest.raises(ValueError, match="Give all_prompt_token_ids or all_prompts"):
        with_engine().gather_and_generate(SAMPLING)


@pytest.mark.parametrize("sleep", [True, False])
def test_the_engine_sleeps_after_the_answers_if_asked(sleep: bool) -> None:
    made = with_engine()
    assert len(made.gather_and_generate(SAMPLING, [[1], [2]], sleep_engine=sleep)) == 2
    assert made.inference_engine is not None
    assert made.inference_engine.status is (EngineStatus.SLEEPED if sleep else EngineStatus.WAKEUP)


@pytest.mark.parametrize(
    ("sampling", "why"),
    [
        ({"max_tokens": 5}, "max_tokens=5, but this engine ends completions after 6"),
        (SimpleNamespace(temperature=1.0, top_p=0.9), "top_p=0.9 is not offered"),
        ({"beams": 2}, r"has \['beams'\], which no engine here reads"),
    ],
)
def test_a_setting_that_would_be_dropped_is_refused(sampling: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        with_engine().engine_generate_local(sampling, [1])


def test_the_temperature_reaches_the_engine() -> None:
    seen: list[Sampling] = []

    class Watched(ScriptedEngine):
        def _serve(self, requests: Any, sampling: Sampling) -> None:
            seen.append(sampling)
            super()._serve(requests, sampling)

    made = with_engine()
    made.inference_engine = Watched(
        RolloutConfig(max_response_tokens=6), vocabulary=20, stop_ids=[1]
    )
    made.inference_engine.load_weights([], version=0)
    for sampling in (
        {"temperature": 0.5},
        SimpleNamespace(temperature=0.0, seed=None, top_p=1.0, top_k=-1),
        {},
    ):
        made.engine_generate_local(sampling, [1])
    assert seen == [Sampling(0.5), Sampling(0.0), Sampling(1.0)]


def test_memory_is_reported_with_a_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    StrategyBase.report_memory("after the update")
    assert re.search(r"\] after the update: \w+ [\d.]+ MiB", capsys.readouterr().out)
    StrategyBase.report_memory()
    assert re.search(r"\] \w+ [\d.]+ MiB", capsys.readouterr().out)
