"""Learning without anything of ours: transformers' model, torch's AdamW, one row at a time.

What actors are compared with.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM


def trained(
    folder: Path,
    rows: Sequence[list[int]],
    prompts: Sequence[int],
    *,
    updates: int,
    learning_rate: float = 1e-2,
) -> Any:
    """The model after so many steps over all rows at once: policy gradient whose advantages are 1,
    clipped at 0.8 and 1.2.

    AdamW with epsilon 1e-4; weights decay by 0.1, norms and biases do not.
    """
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    groups = [
        {
            "params": [p for p in model.parameters() if (p.dim() == 1) is is_norm],
            "weight_decay": 0.0 if is_norm else 0.1,
        }
        for is_norm in (False, True)
    ]
    adam = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), eps=1e-4)
    old = None
    for _ in range(updates):
        picked = [
            logp[prompt - 1 :] for logp, prompt in zip(log_probs(model, rows), prompts, strict=True)
        ]
        flat = torch.cat(picked)
        old = flat.detach() if old is None else old
        ratio = (flat - old).exp()
        loss = -torch.minimum(ratio, ratio.clamp(0.8, 1.2)).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
    return model


def log_probs(model: Any, rows: Sequence[list[int]]) -> list[Tensor]:
    """[length - 1] a row: of each token but the first."""
    found = []
    for row in rows:
        logp = model(torch.tensor([row])).logits[0].log_softmax(-1)
        found.append(logp[:-1].gather(-1, torch.tensor(row[1:], dtype=torch.int64)[:, None])[:, 0])
    return found
