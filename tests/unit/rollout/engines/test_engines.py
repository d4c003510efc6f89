import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rftmega.config import RolloutConfig
from rftmega.core.errors import EngineError, WeightMismatch
from rftmega.core.expert_routes import RoutedModel
from rftmega.core.types import Completion, Prompt, Sampling
from rftmega.model_providers.hf_config import read_hf_config
from rftmega.models.hf.stacked_files import open_folder
from rftmega.rollout.engines import Engine, EngineStatus, ScriptedEngine
from rftmega.rollout.engines.transformers import TransformersEngine
from rftmega.rollout.requests import PromptBatch, Request
from tests.tiny_models import save_tiny, transformers_logits

CONFIG = RolloutConfig(max_response_tokens=6)
PROMPTS = [Prompt((5, 9, 100)), Prompt((3,))]


def scripted() -> ScriptedEngine:
    engine = ScriptedEngine(CONFIG, vocabulary=20, stop_ids=[1])
    engine.load_weights([], version=4)
    return engine


def test_scripted_answers_depend_on_their_own_seed_alone() -> None:
    engine = scripted()
    one, two = engine.generate(PROMPTS, seeds=[7, 8], sampling=Sampling(1.0))
    assert engine.generate(PROMPTS[:1], seeds=[8], sampling=Sampling(1.0)) == [two]
    assert one != two
    assert one.policy_version == 4


def test_scripted_answers_end_in_the_stop_token_or_at_the_limit() -> None:
    for completion in scripted().generate(
        [PROMPTS[0]] * 50, seeds=list(range(50)), sampling=Sampling(1.0)
    ):
        assert len(completion.token_ids) == len(completion.logprobs)
        assert (completion.token_ids[-1] == 1) is (completion.finish_reason == "stop")
        assert len(completion.token_ids) <= 6


def test_of_every_answer_it_tells_once() -> None:
    told: dict[int, Completion] = {}
    completions = scripted().generate(
        PROMPTS,
        seeds=[1, 2],
        sampling=Sampling(1.0),
        finished=lambda at, found: told.update(zip(at, found, strict=True)),
    )
    assert [told[0], told[1]] == completions


class Asking(PromptBatch):
    """Requests with these seeds and, when the engine has room, with the `further` ones."""

    def __init__(self, seeds: list[int], further: list[list[int]]):
        super().__init__([PROMPTS[1]] * len(seeds), seeds, lambda numbers, found: None)
        self.further, self.rooms = further, list[int]()

    def take(self, room: int) -> Sequence[Request]:
        first = super().take(room)
        if first:
            return first
        self.rooms.append(room)
        seeds = self.further.pop(0) if self.further else []
        return [Request(PROMPTS[1].token_ids, seed) for seed in seeds]


def asks_for_more(
    engine: Engine, seeds: list[int], further: list[list[int]]
) -> tuple[list[Completion], list[int]]:
    """All answers; and for how many the engine had room, each time that it asked again."""
    asking = Asking(seeds, further)
    engine.serve(asking, sampling=Sampling(1.0))
    return asking.completions, asking.rooms


def test_an_engine_with_room_answers_more_than_it_began_with_and_the_same() -> None:
    engine = ScriptedEngine(
        RolloutConfig(max_response_tokens=6, max_batch=2), vocabulary=20, stop_ids=[1]
    )
    engine.load_weights([], version=4)
    alone = engine.generate([PROMPTS[1]] * 7, seeds=list(range(7)), sampling=Sampling(1.0))
    found, rooms = asks_for_more(engine, [0, 1], [[2], [3, 4, 5], [6]])
    assert found == alone
    assert min(rooms) >= 1 and max(rooms) == 2, "it asks when there is room, and for so many"
    assert asks_for_more(engine, [0], [])[1][0] == 1, "one of two places is free from the beginning"


def test_an_engine_without_weights_refuses_to_answer() -> None:
    engine = ScriptedEngine(CONFIG, vocabulary=20, stop_ids=[1])
    with pytest.raises(EngineError, match="holds no weights"):
        engine.generate(PROMPTS, seeds=[0, 0], sampling=Sampling(1.0))


def test_sleep_drops_the_weights_and_both_ways_are_idempotent() -> None:
    engine = scripted()
    for _ in range(2):
        engine.sleep()
        assert engine.status is EngineStatus.SLEEPED
    with pytest.raises(EngineError):
        engine.generate(PROMPTS, seeds=[0, 0], sampling=Sampling(1.0))
    engine.load_weights([], version=5)
    # and it woke by itself
    assert engine.generate(PROMPTS, seeds=[0, 0], sampling=Sampling(1.0))[0].policy_version == 5
    for _ in range(2):
        engine.wake()
        assert engine.status is EngineStatus.WAKEUP


def test_a_push_to_a_sleeping_engine_wakes_the_weights_only_and_a_second_one_nothing() -> None:
    woken: list[list[str]] = []

    class Watched(ScriptedEngine):
        def _wake(self, parts):
            woken.append(list(parts))

    engine = Watched(CONFIG, vocabulary=20, stop_ids=[1])
    engine.sleep()
    engine.load_weights([], version=1)
    engine.load_weights([], version=2)
    assert woken == [["weights"]]
    engine.generate(PROMPTS, seeds=[0, 0], sampling=Sampling(1.0))
    assert woken == [["weights"], ["kv_cache"]]
    engine.sleep()
    engine.load_weights([], version=3)
    engine.sleep()  # half awake is awake enough to sleep again
    assert engine.status is EngineStatus.SLEEPED


def test_a_push_that_breaks_off_leaves_the_engine_without_a_version() -> None:
    def broken():
        yield "a", torch.zeros(1)
        raise ConnectionError

    engine = scripted()
    with pytest.raises(ConnectionError):
        engine.load_weights(broken(), version=5)
    with pytest.raises(EngineError):
        engine.generate(PROMPTS, seeds=[0, 0], sampling=Sampling(1.0))


def transformers_engine(folder: Path, routed: RoutedModel | None = None) -> TransformersEngine:
    engine = TransformersEngine(
        folder, CONFIG, stop_ids=[1], where=torch.device("cpu"), routed=routed
    )
    engine.load_weights(load_file(folder / "model.safetensors").items(), version=0)
    return engine


def test_the_oracle_is_greedy_at_temperature_zero_and_reports_what_the_model_says(
    tmp_path: Path,
) -> None:
    folder = save_tiny(tmp_path, "qwen3-tied")
    for prompt, completion in zip(
        PROMPTS,
        transformers_engine(folder).generate(PROMPTS, seeds=[0, 0], sampling=Sampling(0.0)),
        strict=True,
    ):
        row = [*prompt.token_ids, *completion.token_ids]
        logp = transformers_logits(folder, [row])[0].log_softmax(-1)[len(prompt.token_ids) - 1 : -1]
        assert list(completion.token_ids) == logp.argmax(-1).tolist()
        picked = logp.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), picked, atol=1e-5, rtol=0)


def test_the_oracle_takes_one_when_it_is_through_with_the_last(tmp_path: Path) -> None:
    engine = transformers_engine(save_tiny(tmp_path, "llama"))
    alone = engine.generate([PROMPTS[1]] * 4, seeds=[3, 4, 5, 6], sampling=Sampling(1.0))
    assert asks_for_more(engine, [3], [[4, 5], [6]]) == (alone, [1, 1, 1])


def test_the_oracle_reports_log_probs_of_the_tempered_distribution(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "llama")
    told: list[Completion] = []
    completion = transformers_engine(folder).generate(
        PROMPTS[:1],
        seeds=[3],
        sampling=Sampling(0.5),
        finished=lambda at, found: told.extend(found),
    )[0]
    assert told == [completion]
    row = [*PROMPTS[0].token_ids, *completion.token_ids]
    logp = (transformers_logits(folder, [row])[0] / 0.5).log_softmax(-1)[2:-1]
    picked = logp.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(completion.logprobs), picked, atol=1e-5, rtol=0)


def test_the_oracle_refuses_a_push_with_a_tensor_missing_unknown_or_misshapen(
    tmp_path: Path,
) -> None:
    folder = save_tiny(tmp_path, "qwen2")
    tensors = load_file(folder / "model.safetensors")
    engine = transformers_engine(folder)
    name = "model.norm.weight"
    for bad in (
        {k: v for k, v in tensors.items() if k != name},
        tensors | {"x": torch.zeros(1)},
        tensors | {name: torch.zeros(3)},
    ):
        with pytest.raises(WeightMismatch):
            engine.load_weights(bad.items(), version=1)


def chosen_by_hand(config: Any, gate: Any, hidden: torch.Tensor) -> list[list[int]]:
    """The experts of each token, largest weight first, one number at a time."""
    scores = (hidden.double() @ gate.weight.double().T).tolist()
    chosen = []
    for token in scores:
        if not hasattr(gate, "e_score_correction_bias"):
            chosen.append(
                sorted(range(len(token)), key=lambda expert: -token[expert])[
                    : config.num_experts_per_tok
                ]
            )
            continue
        biased = [
            1 / (1 + math.exp(-x)) + float(b)
            for x, b in zip(token, gate.e_score_correction_bias, strict=True)
        ]
        size = len(token) // config.n_group
        groups = [range(start, start + size) for start in range(0, len(token), size)]
        groups.sort(
            key=lambda group: -sum(sorted((biased[expert] for expert in group), reverse=True)[:2])
        )
        allowed = [expert for group in groups[: config.topk_group] for expert in group]
        best = sorted(allowed, key=lambda expert: -biased[expert])[: config.num_experts_per_tok]
        chosen.append(sorted(best, key=lambda expert: -token[expert]))
    return chosen


@pytest.mark.parametrize(
    "variant", ["qwen3-moe", "qwen2-moe", "mixtral", "deepseek-v3", "glm4-moe"]
)
def test_the_oracle_takes_experts_one_by_one_and_tells_where_each_token_went(
    variant: str, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path, variant)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    gates = [module for module in plain.modules() if "topkrouter" in type(module).__name__.lower()]
    active = plain.config.num_experts_per_tok
    experts = gates[0].weight.shape[0]
    engine = transformers_engine(folder, RoutedModel(tuple(range(len(gates))), experts, active))
    fed: list[torch.Tensor] = []
    for gate in gates:
        gate.register_forward_pre_hook(
            lambda module, given: fed.append(given[0].reshape(-1, given[0].shape[-1]))
        )
    for prompt, completion in zip(
        PROMPTS,
        engine.generate(PROMPTS, seeds=[0, 0], sampling=Sampling(0.0)),
        strict=True,
    ):
        row = [*prompt.token_ids, *completion.token_ids]
        fed.clear()
        with torch.no_grad():
            logp = (
                plain(torch.tensor([row[:-1]]))
                .logits[0]
                .log_softmax(-1)[len(prompt.token_ids) - 1 :]
            )
        assert list(completion.token_ids) == logp.argmax(-1).tolist()
        picked = logp.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), picked, atol=1e-5, rtol=0)
        by_layer = [
            chosen_by_hand(plain.config, gate, hidden)
            for gate, hidden in zip(gates, fed, strict=True)
        ]
        assert completion.routes is not None
        assert completion.routes.dtype == torch.uint8
        assert completion.routes.shape == (len(row) - 1, len(gates), active)
        assert completion.routes.transpose(0, 1).tolist() == by_layer


@pytest.mark.parametrize("variant", ["qwen3", "qwen3-moe"])
def test_a_dense_model_has_no_routes_and_others_tell_them_where_they_are_asked(
    variant: str, tmp_path: Path
) -> None:
    (completion, _) = transformers_engine(save_tiny(tmp_path, variant)).generate(
        PROMPTS, seeds=[0, 0], sampling=Sampling(0.0)
    )
    assert completion.routes is None


def test_the_oracle_refuses_a_push_without_one_matrix_of_one_expert(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "mixtral")
    tensors = load_file(folder / "model.safetensors")
    engine = transformers_engine(folder)
    name = "model.layers.2.block_sparse_moe.experts.3.w3.weight"
    del tensors[name]
    with pytest.raises(WeightMismatch, match=name):
        engine.load_weights(tensors.items(), version=1)


@pytest.mark.parametrize("ffn", [32, 64])
def test_matrices_of_each_expert_fill_the_stacks_of_gpt_oss_whatever_their_shapes(
    ffn: int, tmp_path: Path
) -> None:
    """A half of gate and up has the shape of gate; or down has that of its transpose."""
    folder = save_tiny(tmp_path, "gpt-oss", intermediate_size=ffn)
    files = open_folder(folder, read_hf_config(folder))
    engine = transformers_engine(folder)
    tensors = [(name, files.whole(name, files.shape_of(name))) for name in files.names]
    engine.load_weights(tensors, version=1)
    known = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    loaded = engine.model.state_dict()
    assert loaded.keys() == known.keys()
    assert all(torch.equal(loaded[name], known[name]) for name in known)


def test_a_request_is_limited_by_itself_by_the_engine_and_by_the_room_in_a_row() -> None:
    context = (5, 6, 7, 8)
    assert Request(context, 0).limit(9) == 9
    assert Request(context, 0, most=3).limit(9) == 3
    assert Request(context, 0, most=8, answered=2).limit(5) == 3
    assert Request(context, 0, most=8).limit(9, 10) == 6
    assert Request(context, 0, most=2).limit(9, 10) == 2
