"""TRL's GRPO on a published model's chat prompts; knows nothing of this project.

python trl_pretrained.py JSON prints the seconds and rewards of each step and the device's peak
memory. JSON has model, data (JSONL with `messages` and `answer`), steps, prompts, samples, tokens,
engine ("transformers" or "vllm") and memory_fraction. Two optimizer steps, no KL.
"""

import json
import os
import re
import sys
import tempfile
import time

os.environ["HF_HUB_OFFLINE"] = "1"
MINI_BATCHES = 2
NUMBER = re.compile(r"-?\d+")


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

    def last_number(completions: list, answer: list[str], **_: object) -> list[float]:
        said = [NUMBER.findall(completion[-1]["content"]) for completion in completions]
        found = [float(bool(n) and n[-1] == wanted) for n, wanted in zip(said, answer, strict=True)]
        rewards.append(sum(found) / len(found))
        return found

    data = load_dataset("json", data_files=given["data"], split="train")
    with tempfile.TemporaryDirectory() as output:
        vllm = given["engine"] == "vllm"
        config = GRPOConfig(
            output_dir=output,
            use_cpu=not cuda,
            bf16=cuda,
            per_device_train_batch_size=given["prompts"] * given["samples"] // MINI_BATCHES,
            steps_per_generation=MINI_BATCHES,
            num_generations=given["samples"],
            max_completion_length=given["tokens"],
            temperature=1.0,
            beta=0.0,
            learning_rate=5e-6,
            lr_scheduler_type="constant",
            max_steps=given["steps"] * MINI_BATCHES,
            save_strategy="no",
            report_to="none",
            logging_strategy="no",
            disable_tqdm=True,
            gradient_checkpointing=False,
            **(
                {
                    "use_vllm": True,
                    "vllm_mode": "colocate",
                    "vllm_gpu_memory_utilization": given["memory_fraction"],
                }
                if vllm
                else {}
            ),
        )
        trainer = GRPOTrainer(
            model=given["model"],
            reward_funcs=last_number,
            args=config,
            train_dataset=data.rename_column("messages", "prompt"),
            callbacks=[Clock()],
        )
        trainer.train()
    whole = ends[::MINI_BATCHES]
    print(
        json.dumps(
            {
                "seconds": [b - a for a, b in zip(whole, whole[1:], strict=False)],
                "rewards": rewards,
                "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
            }
        )
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
