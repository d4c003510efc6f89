"""Measures steps of TRL's GRPO; runs in TRL's own Python (requirements/trl.txt), without this
project.

python trl_step.py JSON prints the seconds and mean rewards of the steps, and the device's peak
memory. JSON has: model, a folder; data, JSONL with `prompt`, a text, or `messages`, a chat; label,
the key of the answer; pattern, a regular expression whose last match in a completion is compared
with it, "" for all of it; steps; prompts per step; samples per prompt; tokens, the maximum per
completion; kl, its weight; learning_rate; engine, "transformers" or "vllm"; memory_fraction of
vLLM. Each step has two optimizer steps.
"""

import json
import os
import re
import resource
import sys
import tempfile
import time

os.environ["HF_HUB_OFFLINE"] = "1"
MINI_BATCHES = 2


def main(given: dict) -> None:
    import torch
    from datasets import load_dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    cuda = torch.cuda.is_available()
    ends: list[float] = []
    rewards: list[float] = []

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: object, **__: object) -> None:
            ends.append(time.perf_counter())

        def on_step_end(self, *_: object, **__: object) -> None:
            if cuda:
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    def answer(completion: str | list) -> str:
        said = completion if isinstance(completion, str) else completion[-1]["content"]
        if not given["pattern"]:
            return said.strip()
        return (re.findall(given["pattern"], said) or [""])[-1]

    def exact_match(completions: list, **columns: list) -> list[float]:
        wanted = columns[given["label"]]
        found = [float(answer(c) == right) for c, right in zip(completions, wanted, strict=True)]
        rewards.append(sum(found) / len(found))
        return found

    data = load_dataset("json", data_files=given["data"], split="train")
    if "messages" in data.column_names:
        data = data.rename_column("messages", "prompt")
    engine = {}
    if given["engine"] == "vllm":
        engine = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": given["memory_fraction"],
        }
    with tempfile.TemporaryDirectory() as output:
        config = GRPOConfig(
            output_dir=output,
            use_cpu=not cuda,
            bf16=cuda,
            per_device_train_batch_size=given["prompts"] * given["samples"] // MINI_BATCHES,
            steps_per_generation=MINI_BATCHES,
            num_generations=given["samples"],
            max_completion_length=given["tokens"],
            temperature=1.0,
            beta=given["kl"],
            learning_rate=given["learning_rate"],
            lr_scheduler_type="constant",
            max_steps=given["steps"] * MINI_BATCHES,
            save_strategy="no",
            report_to="none",
            logging_strategy="no",
            disable_tqdm=True,
            gradient_checkpointing=False,
            **engine,
        )
        trainer = GRPOTrainer(
            model=given["model"],
            reward_funcs=exact_match,
            args=config,
            train_dataset=data,
            callbacks=[Clock()],
        )
        phases = timed(trainer)
        trainer.train()
    whole = ends[::MINI_BATCHES]
    told = {
        "seconds": [after - before for before, after in zip(whole, whole[1:], strict=False)],
        "phases": phases,
        "rewards": rewards,
        "peak_gib": (torch.cuda.max_memory_allocated() if cuda else resident()) / 2**30,
    }
    print(json.dumps(told))


def resident() -> int:
    """Returns the largest resident memory of this process so far, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def timed(trainer: object) -> dict[str, list[float]]:
    """Returns the seconds of each call of TRL's generation and of its log-probs without gradients,
    which fill while the trainer works.
    """
    import torch

    found: dict[str, list[float]] = {"rollout": [], "score": []}

    def measure(method: str, phase: str) -> None:
        work = getattr(trainer, method)

        def measured(*arguments: object, **named: object) -> object:
            began = time.perf_counter()
            done = work(*arguments, **named)
            if phase == "rollout" or not torch.is_grad_enabled():
                found[phase].append(time.perf_counter() - began)
            return done

        setattr(trainer, method, measured)

    measure("_generate", "rollout")
    measure("_get_per_token_logps_and_entropies", "score")
    return found


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
