"""TRL's GRPO on the demo's model and prompts; run by TRL's own Python (requirements/trl.txt), knows
nothing of this project.

python trl_step.py MODEL DATA STEPS prints the seconds of each step: 64 prompts x 8 answers of at most 4 tokens, two optimizer
steps, KL to the reference.
"""

import json
import os
import sys
import tempfile
import time

os.environ["HF_HUB_OFFLINE"] = "1"
PROMPTS, ANSWERS, MINI_BATCHES = 64, 8, 2


def main(model: str, data: str, steps: int) -> None:
    from datasets import load_dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: object, **__: object) -> None:
            ends.append(time.perf_counter())

        def on_step_end(self, *_: object, **__: object) -> None:
            ends.append(time.perf_counter())

    def exact_match(completions: list[str], label: list[str], **_: object) -> list[float]:
        return [
            float(said.strip() == wanted) for said, wanted in zip(completions, label, strict=True)
        ]

    with tempfile.TemporaryDirectory() as output:
        config = GRPOConfig(
            output_dir=output,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=PROMPTS * ANSWERS // MINI_BATCHES,
            steps_per_generation=MINI_BATCHES,
            num_generations=ANSWERS,
            max_completion_length=4,
            temperature=1.0,
            beta=0.001,
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            max_steps=steps * MINI_BATCHES,
            save_strategy="no",
            report_to="none",
            logging_strategy="no",
            disable_tqdm=True,
            gradient_checkpointing=False,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=exact_match,
            args=config,
            train_dataset=load_dataset("json", data_files=data, split="train"),
            callbacks=[Clock()],
        )
        trainer.train()
    whole = ends[::MINI_BATCHES]
    print(json.dumps([after - before for before, after in zip(whole, whole[1:], strict=False)]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
