"""Runs every language model of transformers, with or without images, through a training run on
FSDP2, stage by stage: `python -m tests.families [TYPE ...]`; writes runs/families.json, and with
`--docs` the table of the documentation (website/architectures.json). `--vllm` measures the cells of
vLLM alone, of models with larger heads, which its CPU kernels need.

A stage's cell is a number (the largest difference from transformers, or from plain torch, in
float64), and a row ends with the reason with which the model is refused before it is built, or with
what failed. Models are tiny (tests/family_configs.py) and all their parameters random.
"""

import argparse
import json
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rftmega.model_providers.transformers_decoders import SEEING
from tests import vision_rows
from tests.family_configs import HEAD, VOCABULARY, tiny_config
from tests.ranks import VLLM, RankFailure, run_ranks
from tests.tiny_vision import save_tiny_vision

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "website/architectures.json"
LENGTHS, PROMPTS = (9, 2, 15, 30), (3, 1, 4, 7)
LARGEST = (
    3_000_000  # parameters; a larger model has a size that tests/family_configs.py doesn't know
)
NOISE = 0.05
TABLE_OF_EXPERTS = ".tid2eid"  # by token id
# fields without which a type is refused, and with which it is measured
ACCEPTED: dict[str, dict[str, Any]] = {
    "hrm_text": {"prefix_lm": False},
    "bert-generation": {"is_decoder": True},
}
LARGE_HEAD = 32  # the smallest that vLLM's kernels for a CPU have
PROMPTED = 2  # rows whose prompts an engine is given
STAGES = ("log-probs", "gradient", "steps", "push", "export", "resume")
BOUNDS = {
    "log-probs": 1e-5,
    "gradient": 1e-5,
    "steps": 1e-5,
    "push": 1e-4,
    "export": 1e-5,
    "resume": 0.0,
}
RATE, EPSILON, BETAS = 1e-3, 1e-4, (0.9, 0.95)


class CannotBuildError(Exception):
    """Raised if transformers itself builds or runs no tiny model of a type."""


def causal_types() -> list[str]:
    """All model types for which AutoModelForCausalLM has a class."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def types_with_media() -> list[str]:
    """All other model types that write text, given images, videos or recordings."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

    return sorted(set(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES) - set(causal_types()))


def save_tiny_of(model_type: str, folder: Path, head: int = HEAD, *, original: bool = True) -> None:
    """Writes a tiny random model as a Hugging Face folder. `head`: elements of a head of attention;
    `original`: with the names and tensors of published folders, not those of transformers' class.

    Raises CannotBuildError if transformers doesn't compute logits with it.
    """
    from transformers import AutoModelForCausalLM

    if model_type in SEEING:
        save_tiny_vision(folder, model_type, **({} if head == HEAD else {"hidden_size": 4 * head}))
        return
    try:
        config = tiny_config(model_type, head)
        for field, value in ACCEPTED.get(model_type, {}).items():
            setattr(config, field, value)
        with torch.device("meta"):
            size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        if size > LARGEST:
            raise ValueError(f"the tiny model has {size:,} parameters")
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            kept = model.state_dict().keys()
            buffers = [each for name, each in model.named_buffers() if name in kept]
            for tensor in [*model.parameters(), *buffers]:
                if tensor.is_floating_point():  # some classes leave memory as it was
                    tensor.nan_to_num_(0.0, 0.0, 0.0).clamp_(-1.0, 1.0)
                    tensor.add_(NOISE * torch.randn(tensor.shape))
            for name, buffer in model.named_buffers():
                if name.endswith(TABLE_OF_EXPERTS):
                    buffer.random_(0, config.num_local_experts)
        logits = model.eval()(input_ids=torch.tensor([[5, 6, 7]]), use_cache=False).logits
        if logits.shape[:2] != (1, 3) or not bool(logits.isfinite().all()):
            raise ValueError(f"its logits are {tuple(logits.shape)}")
        model.save_pretrained(folder, save_original_format=original)
    except Exception as error:
        raise CannotBuildError(f"{type(error).__name__}: {first_line(error)}") from error


def refusal_of(model_type: str) -> str:
    """Returns the reason with which rftmega refuses a model that has the class's own sizes."""
    from rftmega.backends.decoder.describe import describe_any, read_config
    from rftmega.core.errors import CheckpointError

    with tempfile.TemporaryDirectory() as name:
        fields = {"model_type": model_type} | ACCEPTED.get(model_type, {})
        (Path(name) / "config.json").write_text(json.dumps(fields))
        try:
            describe_any(read_config(name))
        except CheckpointError as error:
            return first_line(error).replace(f"{name}: ", "")
    return ""


@dataclass(frozen=True)
class Batch:
    """Batch has rows of several lengths, and what transformers' model is given of each."""

    rows: Any  # rftmega's Rows
    inputs: list[dict[str, Tensor]]

    @property
    def prompts(self) -> list[Any]:
        """Returns the prompts of the first rows, for an engine."""
        from rftmega.core.types import Prompt

        rows, media = self.rows, self.rows.images
        lengths = rows.prompt_lengths.tolist()[:PROMPTED]
        return [
            Prompt(tuple(ids[:length]), images=media.rows[row] if media else ())
            for row, (ids, length) in enumerate(zip(rows.tokens.tolist(), lengths, strict=False))
        ]


def batch_of(folder: Path, *, images: bool = True) -> Batch:
    """Returns the rows that a folder's model is compared on: of text, or with `images` if it sees."""
    from rftmega.core.types import Rows

    if images and json.loads((folder / "config.json").read_text())["model_type"] in SEEING:
        rows = vision_rows.rows_with_images(folder)
        tokens, placed = vision_rows.vision_rows(folder)
        return Batch(rows, list(map(vision_rows.inputs_of, tokens, placed)))
    torch.manual_seed(7)
    lengths = torch.tensor(LENGTHS)
    drawn = torch.randint(3, VOCABULARY, (len(LENGTHS), max(LENGTHS)))  # no special ones
    drawn *= torch.arange(max(LENGTHS)) < lengths[:, None]
    inputs = [{"input_ids": ids[None, :n]} for ids, n in zip(drawn, LENGTHS, strict=True)]
    return Batch(Rows.of_completions(drawn, torch.tensor(PROMPTS), lengths), inputs)


class Plain:
    """Transformers' own model and torch's AdamW, one row at a time."""

    def __init__(self, folder: Path, batch: Batch, dtype: torch.dtype = torch.float64):
        self.model = (
            model_class(folder)
            .from_pretrained(
                folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
            )
            .eval()
        )
        if hasattr(self.model.config, "rescale_every"):
            self.model.config.rescale_every = 0  # RWKV: it rounds otherwise, and changes weights
        self.batch = batch
        self.adam = torch.optim.AdamW(
            self.model.parameters(), lr=RATE, betas=BETAS, eps=EPSILON, weight_decay=0.0
        )

    def log_probs(self) -> Tensor:
        """Of all tokens that the batch trains on, row after row."""
        found = []
        prompts = self.batch.rows.prompt_lengths.tolist()
        for given, prompt in zip(self.batch.inputs, prompts, strict=True):
            every = self.model(**given, use_cache=False).logits[0, :-1].log_softmax(-1)
            targets = given["input_ids"][0, 1:, None]
            found.append(every.gather(-1, targets)[prompt - 1 :, 0])
        return torch.cat(found)

    def gradient_norm(self) -> float:
        """Computes the gradient of the mean -log p, and returns its norm."""
        self.model.zero_grad()
        (-self.log_probs()).mean().backward()
        gradients = [p.grad.norm() for p in self.model.parameters() if p.grad is not None]
        return float(torch.stack(gradients).norm())

    def step(self) -> None:
        self.gradient_norm()
        self.adam.step()


def reference(folder: Path, batch: Batch) -> Plain:
    """Transformers' model in float64; in float32 if its code has numbers of float32 in it."""
    found = Plain(folder, batch)
    try:
        found.log_probs()
    except RuntimeError:
        return Plain(folder, batch, torch.float32)
    return found


def model_class(folder: Path) -> Any:
    """Returns transformers' class that builds a folder's model."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    return AutoModelForImageTextToText if model_type in SEEING else AutoModelForCausalLM


def config_of_sweep(folder: Path, engine: str = "transformers") -> Any:
    from rftmega.config import (
        DataConfig,
        ModelConfig,
        OptimizerConfig,
        RolloutConfig,
        RunConfig,
        TrainerConfig,
    )

    adam = {"learning_rate": RATE, "epsilon": EPSILON, "beta1": BETAS[0], "beta2": BETAS[1]}
    return RunConfig(
        backend="fsdp",
        model=ModelConfig(path=str(folder), dtype="float32"),
        data=DataConfig(train=str(folder / "config.json")),
        optimizer=OptimizerConfig(**adam, weight_decay=0.0, clip_grad=0.0),
        rollout=RolloutConfig(
            engine=engine,
            max_prompt_tokens=40,
            max_response_tokens=24,
            **({"cpu_cache_gib": 0.05} if engine == "vllm" else {}),
        ),
        trainer=TrainerConfig(
            steps=100, max_tokens_per_micro_batch=128, output=str(folder / "out")
        ),
    )


def silence() -> None:
    """Without the warnings and progress bars of transformers about tiny models."""
    from transformers.utils import logging as of_transformers

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    of_transformers.set_verbosity_error()
    of_transformers.disable_progress_bar()


def body(world: Any, folder: Path) -> list[tuple[str, float | str]]:
    """(stage, largest difference) of each stage, then ("refused" or "failed", why) if one failed."""
    found: list[tuple[str, float | str]] = []
    stage = "build"
    silence()
    try:
        for stage, value in stages(world, folder):
            if stage.startswith("to "):
                stage = stage.removeprefix("to ")
                continue
            found.append((stage, value))
    except Exception as error:
        kind = f"{type(error).__name__}: " if not _is_ours(error) else ""
        outcome = "refused" if _is_ours(error) and stage == "build" else "failed"
        found.append((outcome, f"{stage}: {kind}{first_line(error)}"))
    return found


def stages(world: Any, folder: Path) -> Iterator[tuple[str, float]]:
    """Yields (stage, largest difference), and ("to " + stage, 0) before each."""
    from rftmega.algorithms.supervised import cross_entropy_loss
    from rftmega.checkpoints import retention
    from rftmega.checkpoints.run_checkpoints import TrainingCheckpoints
    from rftmega.core.types import Sampling
    from rftmega.run.placement.reinforcement import ReinforcementStrategy
    from rftmega.run.preflight import preflight
    from rftmega.run.train import built_backend
    from rftmega.trainer.experience import complete, given

    config = config_of_sweep(folder)
    preflight(config, 1)
    yield "to build", 0.0
    strategy = ReinforcementStrategy(config, world, built_backend(config), stop_ids=[2])
    yield "to log-probs", 0.0
    batch = batch_of(folder)
    policy, rows, plain = strategy.policy, batch.rows, reference(folder, batch)

    def own() -> Tensor:
        logp: Tensor = policy.log_probs(rows).logp[rows.mask]
        return logp

    yield "log-probs", difference(own(), plain.log_probs())
    yield "to push", 0.0
    strategy.weights.push(version=0)
    rollouts = complete(
        strategy.engine.generate(batch.prompts, seeds=[1, 2], sampling=Sampling(temperature=1.0))
    )
    yield "push", gap_of(policy, batch.prompts, rollouts)
    yield "to gradient", 0.0
    norm = plain.gradient_norm()
    metrics = policy.step(given(rows), cross_entropy_loss())
    yield "gradient", abs(metrics["grad_norm"] - norm) / norm
    yield "to steps", 0.0
    policy.step(given(rows), cross_entropy_loss())
    for _ in range(2):
        plain.step()
    yield "steps", difference(own(), plain.log_probs())
    yield "to export", 0.0
    strategy.export(folder / "exported")
    trained = own()
    yield "export", difference(trained, reference(folder / "exported", batch).log_probs())
    yield "to resume", 0.0
    checkpoints = TrainingCheckpoints(folder / "kept", strategy.trained, config, keep=1)
    checkpoints.save({}, step=2, tag="a", latest=True)
    policy.step(given(rows), cross_entropy_loss())
    after = own()
    checkpoints.load(retention.find(folder / "kept", None), random=False)
    again = own()
    policy.step(given(rows), cross_entropy_loss())
    yield "resume", max(difference(again, trained), difference(own(), after))
    strategy.close()


def vllm_body(world: Any, folder: Path) -> tuple[str, float | str]:
    """("vllm", the larger gap of two pushes), before and after an optimizer step, or ("failed",
    why).
    """
    from rftmega.algorithms.supervised import cross_entropy_loss
    from rftmega.core.types import Sampling
    from rftmega.run.placement.reinforcement import ReinforcementStrategy
    from rftmega.run.preflight import preflight
    from rftmega.run.train import built_backend
    from rftmega.trainer.experience import complete, given

    silence()
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    try:
        config = config_of_sweep(folder, "vllm")
        preflight(config, 1)
        strategy = ReinforcementStrategy(config, world, built_backend(config), stop_ids=[2])
        batch, gaps = batch_of(folder, images=False), []
        for version in range(2):
            strategy.weights.push(version=version)
            sampled = strategy.engine.generate(
                batch.prompts, seeds=[1, 2], sampling=Sampling(temperature=1.0)
            )
            gaps.append(gap_of(strategy.policy, batch.prompts, complete(sampled)))
            strategy.policy.step(given(batch.rows), cross_entropy_loss())
        strategy.close()
    except Exception as error:
        kind = "" if _is_ours(error) else f"{type(error).__name__}: "
        return "failed", f"{kind}{first_line(error)}"
    return "vllm", max(gaps)


def vllm_row(model_type: str) -> dict[str, Any]:
    """The type, with the gap between trainer and vLLM or the reason why there is none ("vllm")."""
    begin, cell = time.monotonic(), None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            save_tiny_of(model_type, folder, LARGE_HEAD)
            ((_, cell),) = run_ranks(1, vllm_body, folder, timeout=150, preloaded=VLLM)
        except CannotBuildError as error:
            cell = f"not built: {error}"
        except RankFailure as error:
            cell = f"process: {first_line(error)}"
        cell = without(folder, cell)
    return {"type": model_type, "vllm": cell, "seconds": round(time.monotonic() - begin, 1)}


def gap_of(policy: Any, prompts: Any, rollouts: Any) -> float:
    """The largest difference between the engine's and the trainer's log-probs of sampled tokens."""
    from rftmega.trainer.experience import collect

    samples = collect(
        prompts,
        rollouts,
        lambda prompts, rollouts: [{"reward": 0.0} for _ in rollouts],
        samples_per_prompt=1,
    )
    rows = samples.rows
    logp = policy.log_probs(rows).logp
    mask = rows.mask.flat.bool()
    return difference(logp.flat[mask], samples.behaviour_logp.flat[mask])


def difference(ours: Tensor, theirs: Tensor) -> float:
    found = float((ours.detach().double() - theirs.detach().double()).abs().max())
    return found if found == found else float("inf")


def _is_ours(error: BaseException) -> bool:
    from rftmega.core.errors import RFTMegaError

    return isinstance(error, RFTMegaError)


def first_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:600]


def row_of(model_type: str) -> dict[str, Any]:
    """The row of a model type."""
    begin = time.monotonic()
    cells: list[tuple[str, float | str]]
    if why := refusal_of(model_type):
        cells = [("refused", why)]
    else:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            try:
                save_tiny_of(model_type, folder)
                ((cells,)) = run_ranks(1, body, folder, timeout=240)
            except CannotBuildError as error:
                cells = [("not built", str(error))]
            except RankFailure as error:
                cells = [("failed", f"process: {first_line(error)}")]
            cells = [(stage, without(folder, value)) for stage, value in cells]
    row: dict[str, Any] = {"type": model_type, **dict(cells)}
    return row | {"seconds": round(time.monotonic() - begin, 1)}


def without(folder: Path, value: float | str) -> float | str:
    """Returns a cell whose text doesn't name the temporary folder."""
    return value if isinstance(value, float) else value.replace(f"{folder}", "FOLDER")


def verdict(row: dict[str, Any]) -> str:
    """ok, refused, not built, failed, or the first stage whose number is too large."""
    for outcome in ("not built", "refused", "failed"):
        if outcome in row:
            return outcome
    wrong = [stage for stage in STAGES if not row[stage] <= BOUNDS[stage]]
    return f"wrong: {wrong[0]}" if wrong else "ok"


def of_the_docs(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row with its verdict, without its time."""
    cells = {name: cell for name, cell in row.items() if name != "seconds"}
    return cells | {"verdict": verdict(row)}


def write_table(rows: list[dict[str, Any]]) -> None:
    """Writes the rows for the documentation (website/architectures.py); those of other types
    stay, and so do the cells of vLLM, which `sweep_vllm` measures.
    """
    known = json.loads(TABLE.read_text())["rows"] if TABLE.is_file() else []
    by_type = {row["type"]: row for row in known}
    for row in map(of_the_docs, rows):
        before = by_type.get(row["type"], {})
        by_type[row["type"]] = row | ({"vllm": before["vllm"]} if "vllm" in before else {})
    content = {
        "command": "python -m tests.families --docs",
        "machine": "CPU",
        "date": time.strftime("%Y-%m-%d"),
        "rows": [by_type[each] for each in causal_types() + types_with_media() if each in by_type],
    }
    TABLE.write_text(json.dumps(content, indent=1) + "\n")


def sweep_vllm(types: Sequence[str], *, docs: bool) -> int:
    """Measures the cells of vLLM of `types`, without any of all that are trained; with `docs`,
    writes them into the table of the documentation. Returns the exit code.
    """
    content = json.loads(TABLE.read_text())
    chosen = [
        row
        for row in content["rows"]
        if row["type"] in (types or [row["type"]]) and row["verdict"] == "ok"
    ]
    for row in chosen:
        found = vllm_row(row["type"])
        row["vllm"] = cell = found["vllm"]
        if isinstance(cell, str):
            row["vllm"] = cell[:300].split(" If it does not")[0]
        print(f"{row['type']:26} {found['seconds']:6} {found['vllm']}", flush=True)
        if docs:
            TABLE.write_text(json.dumps(content, indent=1) + "\n")
    wrong = [
        row
        for row in chosen
        if isinstance(row["vllm"], float) and not row["vllm"] <= BOUNDS["push"]
    ]
    print(f"{len(chosen)} types, {len(wrong)} wrong")
    return int(bool(wrong))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("types", nargs="*", help="model types; all without")
    parser.add_argument("--docs", action="store_true", help=f"write {TABLE.relative_to(ROOT)}, too")
    parser.add_argument("--vllm", action="store_true", help="the cells of vLLM alone")
    given = parser.parse_args()
    silence()
    if given.vllm:
        return sweep_vllm(given.types, docs=given.docs)
    target = ROOT / "runs/families.json"
    target.parent.mkdir(exist_ok=True)
    rows = []
    for model_type in given.types or causal_types() + types_with_media():
        rows.append(row_of(model_type))
        row = rows[-1]
        numbers = " ".join(f"{stage} {row[stage]:.0e}" for stage in STAGES if stage in row)
        why = next((row[name] for name in ("not built", "refused", "failed") if name in row), "")
        print(f"{model_type:26} {verdict(row):18} {numbers} {why}", flush=True)
        if not given.types:
            target.write_text(json.dumps(rows, indent=1) + "\n")
    if given.docs:
        write_table(rows)
    bad = [row for row in rows if verdict(row).startswith(("wrong", "failed"))]
    print(f"{len(rows)} types, {len(bad)} failed or wrong")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
