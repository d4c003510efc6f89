"""Writes the page about architectures on FSDP2 from architectures.json, which
`python -m tests.families --docs` measures.
"""

import json
from pathlib import Path

RECORD = Path(__file__).with_name("architectures.json")
PAGE = "fsdp_architectures.md"
STAGES = ("log-probs", "gradient", "steps", "push", "export", "resume")
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

Bounds are 1e-5 (push: 1e-4, resume: 0).
Rows of `qwen2_vl`, `qwen2_5_vl` and `qwen3_vl` have images.
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
    parts.append(f"| `model_type` | {' | '.join(STAGES)} |\n{'|---' * (1 + len(STAGES))}|")
    parts += [
        f"| `{row['type']}` | {' | '.join(f'{row[stage]:.0e}' for stage in STAGES)} |"
        for row in trained
    ]
    for outcome, head in (("refused", REFUSED), ("not built", NOT_BUILT)):
        if chosen := [row for row in rows if row["verdict"] == outcome]:
            parts.append(head.format(number=len(chosen)))
            parts.append("| `model_type` | why |\n|---|---|")
            parts += [f"| `{row['type']}` | {reason(row[outcome])} |" for row in chosen]
    return "\n".join(parts) + "\n"


def reason(text: str) -> str:
    """Returns a message as the cell of a table."""
    text = text.removeprefix("build: ").removeprefix("This run can't start: - ")
    return text.replace("|", "\\|").replace("model.path=FOLDER: ", "").replace("<", "&lt;")
