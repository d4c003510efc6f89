import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from rftmega.config import DataConfig, ModelConfig, ParallelConfig, RolloutConfig, RunConfig
from rftmega.config.options.algorithms import GAE, TokenImportance
from rftmega.config.options.speculative import DraftModel, LookupDrafts
from rftmega.config.options.teachers import Teacher
from rftmega.core.errors import ConfigError
from rftmega.model_providers.optional_cuda_packages import Installed
from rftmega.models.hf.export_folder import MARK
from rftmega.run import preflight as checks
from rftmega.run.placement import engines
from rftmega.run.preflight import preflight
from rftmega.runtime import device
from rftmega.runtime.device import CPU, CUDA, hardware
from rftmega.runtime.device.hardware import Hardware
from tests.block_scales import quantise_folder
from tests.families import save_tiny_of
from tests.tiny_decoders import save_decoder
from tests.tiny_models import save_tiny

P = ParallelConfig


def config_of(folder: Path, variant: str, parallel: ParallelConfig, engine: str) -> RunConfig:
    (folder / "data.jsonl").write_text("")
    return RunConfig(
        model=ModelConfig(path=str(save_tiny(folder, variant))),
        parallel=parallel,
        data=DataConfig(train=str(folder / "data.jsonl")),
        rollout=RolloutConfig(engine=engine, max_prompt_tokens=16, max_response_tokens=16),
    )


@pytest.mark.parametrize(
    ("variant", "parallel", "processes"),
    [
        ("qwen3", P(tensor=2, pipeline=2, context=2), 8),
        ("qwen3-moe", P(tensor=2, sequence=True, expert=4), 4),
        ("qwen2-tied", P(pipeline=2, virtual_pipeline=2), 4),
    ],
)
def test_what_works_is_let_through(
    variant: str, parallel: ParallelConfig, processes: int, tmp_path: Path
) -> None:
    preflight(config_of(tmp_path, variant, parallel, "scripted"), processes)


def test_processes_that_cannot_share_a_model_under_fsdp_are_told_before_weights_are_read(
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path, "qwen3", P(tensor=4), "scripted")  # it has 2 key-value heads
    config.backend = "fsdp"
    with pytest.raises(ConfigError, match="parallel.tensor=4 does not divide the 2 heads"):
        preflight(config, 4)


def test_an_output_head_that_fsdp_has_no_log_probs_of_is_told_before_a_run(tmp_path: Path) -> None:
    config = config_of(tmp_path, "qwen3", P(), "scripted")
    config.backend = "fsdp"
    preflight(config, 1)
    save_decoder(tmp_path, "gemma2")  # a soft cap is computed
    preflight(config, 1)
    save_tiny_of("modernbert-decoder", tmp_path)
    with pytest.raises(
        ConfigError, match="ModernBertDecoderForCausalLM can't be trained with back"
    ):
        preflight(config, 1)


@pytest.mark.parametrize(
    "teacher",
    [
        Teacher(path="self", prompt="hint", vocabulary="top_k"),
        Teacher(addresses=["http://h:1"], vocabulary="top_k"),
    ],
)
def test_a_teacher_knows_more_tokens_than_it_is_asked_for(tmp_path: Path, teacher: Teacher) -> None:
    config = config_of(tmp_path, "qwen3", P(), "scripted")
    config.algorithm.teachers = [replace(teacher, top_k=131)]
    with pytest.raises(ConfigError, match="teacher: top_k=131 must be below its vocabulary, 131"):
        preflight(config, 1)
    config.algorithm.teachers = [replace(teacher, top_k=130)]
    preflight(config, 1)


def test_a_teacher_is_checked_and_described_for_its_own_backend(tmp_path: Path) -> None:
    config = config_of(tmp_path, "qwen3", P(pipeline=2), "scripted")
    (tmp_path / "teacher").mkdir()
    teacher = Teacher(path=str(save_decoder(tmp_path / "teacher", "cohere")), name="expert")
    config.algorithm.teachers = [teacher]
    with pytest.raises(ConfigError, match="algorithm.teachers: expert: path: .*cohere"):
        preflight(config, 2)
    teacher.backend = "fsdp"
    preflight(config, 2)
    assert "expert      cohere, " in checks.dry_run(config, 2)
    assert "parameters, backend fsdp, 1 replica(s), each over 2" in checks.dry_run(config, 2)
    modules = checks.slow_modules(config)
    assert modules == ["rftmega.backends.megatron", "rftmega.backends.fsdp.backend"]
    teacher.parallel = P(tensor=4)  # it has 2 key-value heads
    with pytest.raises(ConfigError, match="parallel.tensor=4 does not divide the 2 heads"):
        preflight(config, 4)
    teacher.parallel = P()
    save_tiny_of("modernbert-decoder", tmp_path / "teacher")
    with pytest.raises(ConfigError, match="expert: path=.*ModernBertDecoderForCausalLM can't be"):
        preflight(config, 2)


@pytest.mark.parametrize(
    ("backend", "engine", "said"),
    [
        ("fsdp", "scripted", "or take backend=megatron"),
        ("megatron", "transformers", "Set rollout.engine=vllm"),
    ],
)
def test_a_type_that_transformers_does_not_have_is_told_in_our_words(
    backend: str, engine: str, said: str, tmp_path: Path
) -> None:
    config = config_of(tmp_path, "deepseek-v3", P(), engine)
    config.backend = backend
    file = tmp_path / "config.json"
    code = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    kimi = {"model_type": "kimi_k2", "auto_map": code}
    file.write_text(json.dumps(json.loads(file.read_text()) | kimi))
    with pytest.raises(ConfigError, match="has no model_type=kimi_k2") as caught:
        preflight(config, 1)
    assert said in str(caught.value)
    assert "trust_remote_code" not in str(caught.value)


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_a_moe_has_real_engines_on_a_cpu(engine: str, tmp_path: Path) -> None:
    preflight(config_of(tmp_path, "qwen3-moe", P(), engine), 1)


@pytest.mark.parametrize(
    ("variant", "parallel", "processes", "engine", "complaints"),
    [
        (
            "qwen3",
            P(tensor=2, context=2),
            6,
            "scripted",
            ["parallel.tensor x parallel.context = 2 x 2 = 4 does not divide the 6"],
        ),
        (
            "qwen3-moe",
            P(expert=4),
            6,
            "scripted",
            ["parallel.expert = 4 does not divide the 6 launched processes. Launch 8"],
        ),
        (
            "qwen3-moe",
            P(tensor=2, expert=3),
            6,
            "scripted",
            ["number of experts, 4; the nearest", "needs parallel.sequence=true"],
        ),
        (
            "qwen3",
            P(pipeline=3, virtual_pipeline=2),
            3,
            "scripted",
            ["parallel.pipeline=3 does not divide the model's 4 layers"],
        ),
        (
            "qwen3",
            P(virtual_pipeline=2),
            1,
            "scripted",
            ["parallel.virtual_pipeline=2 needs parallel.pipeline > 1"],
        ),
        (
            "deepseek-v3",
            P(),
            1,
            "vllm",
            ["know kv_lora_rank + qk_rope_head_dim = 576 only, not 24"],
        ),
        (
            "minimax-m2",
            P(),
            1,
            "vllm",
            ["lacks the choice of experts by sigmoid scores without groups"],
        ),
        ("qwen2", P(), 1, "vllm", ["know no head size 16 (head_dim of the model), only 32"]),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason_and_what_does(
    variant: str,
    parallel: ParallelConfig,
    processes: int,
    engine: str,
    complaints: list[str],
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError) as caught:
        preflight(config_of(tmp_path, variant, parallel, engine), processes)
    assert all(complaint in str(caught.value) for complaint in complaints), caught.value
    assert str(caught.value).count("\n  - ") == len(complaints)


def test_value_models_fit_the_policys_tokens_and_a_reward_model_has_a_head(tmp_path: Path) -> None:
    config = config_of(tmp_path, "qwen3", P(), "scripted")
    config.reward.model = 1.0
    config.reward.model_path = config.model.path
    with pytest.raises(
        ConfigError, match=r"holds no score.weight: a policy says nothing about answers"
    ):
        preflight(config, 1)
    config.reward.model, config.reward.model_path = 0.0, ""
    config.reward.cost, config.reward.cost_path = 1.0, config.model.path
    with pytest.raises(ConfigError, match=r"reward.cost_path=.* Give a cost model."):
        preflight(config, 1)
    config.reward.cost, config.reward.cost_path = 0.0, ""
    config.algorithm.advantage = GAE()
    config.critic.path = str(
        save_tiny(tmp_path / "other", "qwen3", vocab_size=77, max_position_embeddings=16)
    )
    with pytest.raises(ConfigError) as caught:
        preflight(config, 1)
    for complaint in (
        "knows 77 tokens, the policy 131",
        "knows 16 positions; it reads rows of up to 32 tokens",
    ):
        assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("task", "names"),
    [("rl", ["policy", "policy_ema"]), ("sft", ["policy"]), ("reward_model", ["reward_model"])],
)
def test_a_folder_that_an_export_could_not_replace_is_refused_at_the_start(
    task: str, names: list[str], tmp_path: Path
) -> None:
    config = config_of(tmp_path, "qwen3", P(), "scripted")
    config.trainer.output = str(tmp_path / "out")
    config.algorithm.task = task
    config.algorithm.ema_beta = 0.9 * (task == "rl")
    for name in ("policy", "policy_ema", "reward_model"):
        (tmp_path / "out" / name).mkdir(parents=True)
        (tmp_path / "out" / name / "thesis").write_text("years")
    with pytest.raises(ConfigError) as refused:
        preflight(config, 1)
    said = str(refused.value)
    assert [
        name
        for name in ("policy", "policy_ema", "reward_model")
        if f"{tmp_path / 'out' / name} is there" in said
    ] == names
    for name in names:
        (tmp_path / "out" / name / MARK).write_text("")
    said = ""
    try:
        preflight(config, 1)
    except ConfigError as error:  # of options that the task does not read
        said = str(error)
    assert "is there" not in said


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("config.json", b"\x89PNG", "config.json:1: not UTF-8"),
        ("config.json", b"[]", "config.json holds a list"),
        (
            "config.json",
            b'{"model_type": "qwen3", "hidden_size": "128", "num_attention_heads": 0}',
            "hidden_size is '128', not a",
        ),
        ("model.safetensors.index.json", b"garbage", "index.json:1: not JSON"),
        ("model.safetensors.index.json", b"{}", "index.json is no index of weights"),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"a": "gone.safetensors"}}',
            "names gone.safetensors, which is missing",
        ),
    ],
)
def test_a_broken_file_of_the_model_is_named_before_anything_starts(
    name: str, content: bytes, complaint: str, tmp_path: Path
) -> None:
    config = config_of(tmp_path, "qwen3", P(), "scripted")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as refusal:
        preflight(config, 1)
    assert complaint in str(refusal.value)


def test_a_config_that_is_a_loop_of_links_is_named_before_anything_starts(tmp_path: Path) -> None:
    config = config_of(tmp_path, "qwen3", P(), "scripted")
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").symlink_to(tmp_path / "config.json")
    with pytest.raises(ConfigError, match=r"config\.json"):
        preflight(config, 1)


def test_on_cuda_experts_need_transformer_engine_and_the_gpus_that_are_there_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the run is, not where it is only planned."""
    config = config_of(tmp_path, "qwen3-moe", P(), "scripted")
    preflight(config, 1)
    monkeypatch.setattr(hardware, "found", lambda: Hardware("575.57.08", "13.0"))
    with pytest.raises(ConfigError, match="needs driver 580 or newer; this host has 575.57.08"):
        preflight(config, 1)
    preflight(config, 1, on=device.CUDA())
    monkeypatch.setattr(hardware, "found", Hardware)
    monkeypatch.setattr(device, "current", lambda: device.CUDA())
    missing = Installed(why_not="OSError: libcudnn.so.9")
    monkeypatch.setattr(checks, "installed", lambda: missing)
    monkeypatch.setattr(checks, "uses_transformer_engine", lambda: False)
    with pytest.raises(
        ConfigError, match="this run would be without Transformer Engine: OSError: libcudnn.so.9"
    ):
        preflight(config, 1)
    monkeypatch.setattr(checks, "uses_transformer_engine", lambda: True)
    preflight(config, 1)


def test_a_model_of_no_table_is_let_through_under_fsdp_unless_its_angles_change(
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path, "qwen3", P(), "scripted")
    folder = save_decoder(tmp_path / "other", "cohere")
    config = replace(config, backend="fsdp", model=ModelConfig(path=str(folder)))
    preflight(config, 4)
    with pytest.raises(ConfigError, match="model_type"):
        preflight(replace(config, backend="megatron"), 1)
    fields = json.loads((folder / "config.json").read_text())
    scaling = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    fields |= {"rope_parameters": scaling, "max_position_embeddings": 31}
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match="rope_type=dynamic"):
        preflight(config, 4)


def test_rows_beyond_longropes_original_positions_are_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path, "phi4-mini", P(), "scripted")
    config.rollout.max_prompt_tokens, config.rollout.max_response_tokens = 40, 24
    preflight(config, 1)
    config.rollout.max_response_tokens = 25
    with pytest.raises(ConfigError, match="= 65, but with rope_type=longrope, rows beyond 64"):
        preflight(config, 1)


def test_weights_are_written_quantised_only_where_the_models_are(tmp_path: Path) -> None:
    config = config_of(tmp_path, "deepseek-v3", P(), "scripted")
    config.trainer.export_quantised = True
    with pytest.raises(ConfigError, match="has no quantised weights"):
        preflight(config, 1)
    quantise_folder(tmp_path, tmp_path / "quantised", (16, 32))
    config.model.path = str(tmp_path / "quantised")
    preflight(config, 1)
    config.trainer.export = False
    with pytest.raises(ConfigError, match="export_quantised=true needs trainer.export=true"):
        preflight(config, 1)


def test_vllm_has_8_bits_where_the_device_multiplies_them_and_blocks_are_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = config_of(tmp_path, "qwen3", P(), "vllm")
    config.rollout.quantization = "fp8"
    config.algorithm.importance_sampling = TokenImportance()
    monkeypatch.setattr(CPU, "has_fp8_matmul", lambda self: False)
    with pytest.raises(ConfigError, match="on CUDA, and on CPUs with AMX. Here rollout.engine=tra"):
        preflight(config, 1)
    monkeypatch.setattr(CPU, "has_fp8_matmul", lambda self: True)
    with pytest.raises(
        ConfigError, match="the 64 rows of keys over rollout.tensor=1 processes are"
    ):
        preflight(config, 1)
    whole = {"head_dim": 64, "num_attention_heads": 4, "intermediate_size": 256}
    save_tiny(tmp_path, "qwen3", **whole)
    preflight(config, 1)
    save_tiny(tmp_path, "deepseek-v3")
    with pytest.raises(
        ConfigError, match="latent or linear attention, or that see or hear, can't have it"
    ):
        preflight(config, 1)


def test_products_of_8_bits_need_transformer_engine_and_a_device_that_has_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = config_of(tmp_path, "qwen3", P(), "transformers")
    config.model.fp8 = "blockwise"
    with pytest.raises(ConfigError, match=r"needs Transformer Engine 2\.6 or later on CUDA; this"):
        preflight(config, 1)
    monkeypatch.setattr(checks, "installed", lambda: Installed(transformer_engine=(2, 5)))
    with pytest.raises(ConfigError, match=r"this run would be Transformer Engine 2\.5"):
        preflight(config, 1)
    monkeypatch.setattr(checks, "installed", lambda: Installed(transformer_engine=(2, 9)))
    monkeypatch.setattr(CPU, "fp8_matmuls", lambda self: ("mxfp8",))
    with pytest.raises(ConfigError, match="does not multiply so. Set it to mxfp8"):
        preflight(config, 1)
    monkeypatch.setattr(CPU, "fp8_matmuls", lambda self: ("blockwise",))
    preflight(config, 1)
    save_tiny(tmp_path, "qwen3", intermediate_size=120)
    with pytest.raises(ConfigError, match="whose sides are multiples of 16; .* has 120"):
        preflight(config, 1)
    save_tiny(tmp_path, "deepseek-v3")
    with pytest.raises(
        ConfigError, match="latent or linear attention, or that see or hear, can't have it"
    ):
        preflight(config, 1)


@pytest.mark.parametrize(
    ("capability", "products"),
    [((8, 9), ()), ((9, 0), ("blockwise",)), ((10, 0), ("mxfp8",))],
)
def test_a_device_says_which_products_of_8_bits_it_has(
    capability: tuple[int, int], products: tuple[str, ...]
) -> None:
    cuda = object.__new__(CUDA)
    cuda._cuda = SimpleNamespace(get_device_capability=lambda: capability)
    assert cuda.fp8_matmuls() == products


@pytest.mark.parametrize("variant", ["qwen3-moe", "mixtral"])
def test_modules_that_keep_their_precision_are_named(variant: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, variant)
    names = load_file(folder / "model.safetensors")
    routers = {name.removesuffix(".weight") for name in names if name.endswith(".gate.weight")}
    assert len(routers) >= 2
    kept = engines.modules_kept(str(folder))
    assert sorted(kept) == sorted(["lm_head", "model.embed_tokens", *routers])


def test_a_model_with_recurrent_layers_does_not_decode_speculatively(tmp_path: Path) -> None:
    config = config_of(tmp_path, "qwen3.5", P(), "vllm")
    config.rollout.speculative = LookupDrafts()
    with pytest.raises(ConfigError, match="have a recurrent state, from which rejected tokens"):
        preflight(config, 1)


def test_a_draft_model_reads_and_writes_the_policys_tokens(tmp_path: Path) -> None:
    config = config_of(tmp_path, "qwen3", P(), "vllm")
    drafts = save_tiny(tmp_path / "drafts", "qwen2", vocab_size=64)
    config.rollout.speculative = DraftModel(path=str(drafts))
    with pytest.raises(ConfigError, match=r"drafts has a vocabulary of 64, the policy one of \d+"):
        preflight(config, 1)
    same = save_tiny(tmp_path / "same", "qwen2")
    for folder, words in ((Path(config.model.path), "abc"), (same, "acb")):
        model = {"type": "BPE", "vocab": {word: at for at, word in enumerate(words)}, "merges": []}
        (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    config.rollout.speculative = DraftModel(path=str(same))
    with pytest.raises(
        ConfigError, match="'b' is id 1 of the policy, and id 2 of it. Take a draft"
    ):
        preflight(config, 1)


@pytest.mark.parametrize(
    ("variant", "changes", "options", "said"),
    [
        ("qwen3.5", {}, {}, "have a recurrent state"),
        ("qwen2", {"max_position_embeddings": 33}, {}, "knows 33 positions; .* up to 36 tokens"),
        (
            "qwen2",
            {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48},
            {"tensor": 2},
            "has 3 attention heads, which rollout.tensor=2 does not",
        ),
    ],
)
def test_a_draft_model_that_vllm_could_not_use_is_named(
    variant: str, changes: dict[str, int], options: dict[str, int], said: str, tmp_path: Path
) -> None:
    config = config_of(tmp_path, "qwen3", P(), "vllm")
    drafts = save_tiny(tmp_path / "drafts", variant, **changes)
    config.rollout = replace(
        config.rollout, speculative=DraftModel(path=str(drafts), draft_tokens=4), **options
    )
    with pytest.raises(ConfigError, match=rf"drafts.* {said}"):
        preflight(config, 2)
