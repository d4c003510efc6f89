"""Writes the page about architectures on FSDP2 from architectures.json, which
`python -m tests.families --docs` measures.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_name("architectures.json")
PAGE = "fsdp_architectures.md"
STAGES = ("log-probs", "gradient", "steps", "push", "export", "resume")
PUSH_BOUND = 1e-4
HEAD = """# Architectures on FSDP2

With `backend: fsdp`, rftmega trains a model by transformers' own code. This page has a row for every type that transformers
5.19 registers as a language model, with or without images. `{command}` measured it on {date} ({machine}).

## {trained} types are trained

For each type, a tiny model with random weights, biases and buffers went through a training run in float32. A cell is the largest
difference from transformers' model in float64, one row at a time:

- *log-probs*: of the trained tokens, before training. rftmega packs rows where the model allows it.
- *gradient*: the relative difference of the gradient's norm.
- *steps*: log-probs after two steps, against torch's AdamW.
- *push*: log-probs of sampled tokens, between rftmega and its transformers engine after a weight push.
- *export*: log-probs of the exported folder, which transformers reads.
- *resume*: log-probs after loading a training checkpoint, and after one more step.
- *vLLM*: as *push*, with vLLM on a CPU, before and after an optimizer step. *no*: see [below](#not-in-vllm-on-a-cpu).

Bounds are 1e-5 (push and vLLM: 1e-4, resume: 0).
Rows of `qwen2_vl`, `qwen2_5_vl` and `qwen3_vl` have images, but for vLLM.
`hrm_text` has `prefix_lm: false`; with true it is refused.
"""
WITHOUT_VLLM = """
## Not in vLLM on a CPU

On a CPU, take `rollout.engine=transformers` for these {number} types. vLLM for GPUs has other kernels, and was not measured.
A row has what vLLM said, or how far its log-probs are from rftmega's.
"""
REFUSED = """
## {number} types are refused

The run ends with this message before weights are read.
"""
NOT_BUILT = """
## {number} types could not be tried

transformers builds no tiny model of these types.
"""


def architectures_page(record: Path = RECORD) -> str:
    """Returns the page as Markdown."""
    content = json.loads(record.read_text())
    rows = content["rows"]
    trained = [row for row in rows if row["verdict"] == "ok"]
    parts = [
        HEAD.format(trained=len(trained), **{k: content[k] for k in ("command", "date", "machine")})
    ]
    columns = (*STAGES, "vLLM")
    parts.append(f"| `model_type` | {' | '.join(columns)} |\n{'|---' * (1 + len(columns))}|")
    parts += [
        f"| `{row['type']}` | {' | '.join([f'{row[stage]:.0e}' for stage in STAGES] + [vllm_cell(row)])} |"
        for row in trained
    ]
    if without := [row for row in trained if vllm_cell(row) == "no"]:
        parts.append(WITHOUT_VLLM.format(number=len(without)))
        parts.append("| `model_type` | why |\n|---|---|")
        parts += [f"| `{row['type']}` | {why_not_in_vllm(row)} |" for row in without]
    for outcome, head in (("refused", REFUSED), ("not built", NOT_BUILT)):
        if chosen := [row for row in rows if row["verdict"] == outcome]:
            parts.append(head.format(number=len(chosen)))
            parts.append("| `model_type` | why |\n|---|---|")
            parts += [f"| `{row['type']}` | {reason(row[outcome])} |" for row in chosen]
    return "\n".join(parts) + "\n"


def vllm_cell(row: Mapping[str, Any]) -> str:
    """Returns the largest difference between rftmega and vLLM, or "no" if it is above the bound or
    vLLM can't run the model.
    """
    found = row.get("vllm", "not measured")
    return f"{found:.0e}" if isinstance(found, float) and found <= PUSH_BOUND else "no"


def why_not_in_vllm(row: Mapping[str, Any]) -> str:
    """Returns the reason as the cell of a table."""
    found = row.get("vllm", "not measured")
    if isinstance(found, float):
        return f"its log-probs differ by {found:.1g}"
    return reason(found[:200])


def reason(text: str) -> str:
    """Returns a message as the cell of a table."""
    text = text.removeprefix("build: ").removeprefix("This run can't start: - ")
    return text.replace("|", "\\|").replace("model.path=FOLDER: ", "").replace("<", "&lt;")
