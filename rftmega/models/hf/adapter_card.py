"""Writes the model card (README.md) of a PEFT adapter folder."""

from collections.abc import Sequence
from pathlib import Path

CARD = "README.md"
FRONT = """---
library_name: peft
pipeline_tag: {task}
tags: [lora, rftmega]
{base_model}---
"""
TEXT = """
# Adapters on {base}

Low-rank adapters (LoRA, arXiv:2106.09685) that rftmega trained: rank {rank}, alpha {alpha:g}{rslora}, on {targets}{whole}.

```python
from peft import PeftModel
from transformers import {auto}

model = {auto}.from_pretrained({base!r}{labels})
model = PeftModel.from_pretrained(model, "this folder")
```
"""
SERVED = """
vLLM serves them beside the model: `vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules name=this_folder`.
"""
# PEFT's task type -> the hub's task and transformers' class
TASKS = {
    "CAUSAL_LM": ("text-generation", "AutoModelForCausalLM"),
    "SEQ_CLS": ("text-classification", "AutoModelForSequenceClassification"),
    "TOKEN_CLS": ("token-classification", "AutoModelForTokenClassification"),
}


def write_card(
    folder: Path,
    *,
    base: str,
    task: str,
    rank: int,
    alpha: float,
    rslora: bool,
    targets: Sequence[str],
    whole: Sequence[str],
) -> None:
    """Writes the model card; the hub links it to `base` if that is a model name on the hub and no
    local folder.
    `task`: PEFT's task type, a key of TASKS. `targets`: modules with a LoRA pair; `whole`: modules
    that were trained in full in addition.
    """
    pipeline, auto = TASKS[task]
    of_hub = base.count("/") == 1 and not Path(base).exists()
    said = FRONT.format(task=pipeline, base_model=f"base_model: {base}\n" if of_hub else "")
    said += TEXT.format(
        base=base,
        rank=rank,
        alpha=alpha,
        rslora=", divided by the root of the rank" if rslora else "",
        targets=", ".join(targets),
        whole=f"; {', '.join(whole)} learnt whole" if whole else "",
        auto=auto,
        labels=", num_labels=1" if whole else "",
    )
    if not whole:
        said += SERVED.format(base=base, rank=rank)
    (folder / CARD).write_text(said)
