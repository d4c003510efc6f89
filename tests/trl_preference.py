"""Writes unit/algorithms/trl_preference.json: what TRL's own preference losses make of random
log-probs, which tests compare with those of this package.

Runs in a Python with requirements/trl.txt, from the root of the repository, and needs nothing of
this package:

    E/bin/python tests/trl_preference.py
"""

import json
import random
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import trl
from torch import Tensor
from trl import DPOTrainer, KTOTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

FILE = Path(__file__).parent / "unit/algorithms/trl_preference.json"
PAIRS, LONGEST = 5, 9
ALONE = SimpleNamespace(
    device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: torch.as_tensor(x)
)


def drawn() -> dict[str, Any]:
    """Log-probs of the tokens of ten responses, chosen and rejected by turns, and of their references."""
    random.seed(7)
    rows = [
        [-random.expovariate(0.8) for _ in range(random.randint(1, LONGEST))]
        for _ in range(2 * PAIRS)
    ]
    return {
        "logp": rows,
        "reference": [sum(row) + random.gauss(0, 2) for row in rows],
        "kl_logp": [random.gauss(-4, 1) for _ in rows],
        "kl_reference": [random.gauss(-5, 1) for _ in rows],
        "desirable": [True, False, False, True, True, True, False, True, False, True],
    }


def trainer(**settings: Any) -> Any:
    own = {
        "accelerator": ALONE,
        "_metrics": {"train": defaultdict(list)},
        "model": SimpleNamespace(training=True),
        "aux_loss_enabled": False,
        "precompute_ref_logps": True,
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    return SimpleNamespace(**own | settings)


def padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """[B, T] log-probs behind a prompt of two tokens, and the mask [B, T + 1] of the responses' tokens."""
    logp, mask = torch.zeros(len(rows), LONGEST + 1), torch.zeros(len(rows), LONGEST + 2)
    found = []
    for number, row in enumerate(rows):
        mask[number, 2 : 2 + len(row)] = 1
        blank = torch.zeros(LONGEST - len(row))
        found.append(torch.cat([torch.zeros(1), row, blank]))
    return torch.stack(found) if found else logp, mask


def model_of(logp: Tensor) -> Any:
    def model(**_: Any) -> SimpleNamespace:
        zeros = torch.zeros_like(logp)
        return SimpleNamespace(log_probs=logp, entropy=zeros, mean_logits=zeros, is_top1=zeros > 0)

    return model


def dpo(data: dict[str, Any], rows: list[Tensor], **settings: Any) -> tuple[Tensor, dict[str, Any]]:
    """TRL's rows are all chosen responses, then all rejected ones."""
    order = [*range(0, 2 * PAIRS, 2), *range(1, 2 * PAIRS, 2)]
    logp, mask = padded([rows[place] for place in order])
    chosen = {"loss_weights": [1.0], "ld_alpha": None, "f_divergence_type": "reverse_kl"}
    own = trainer(**chosen, use_weighting=False, **settings)
    reference = torch.tensor(data["reference"])[order]
    given = {
        "input_ids": torch.zeros(mask.shape, dtype=torch.int64),
        "attention_mask": mask,
        "completion_mask": mask,
        "ref_chosen_logps": reference[:PAIRS],
        "ref_rejected_logps": reference[PAIRS:],
    }
    return DPOTrainer._compute_loss(own, model_of(logp), given, False), own._metrics["train"]


def kto(data: dict[str, Any], rows: list[Tensor], **settings: Any) -> tuple[Tensor, dict[str, Any]]:
    logp, mask = padded(rows)
    own = trainer(calculate_KL=True, loss_type="kto", **settings)
    own._compute_kl_logps = lambda model, batch: torch.tensor(data["kl_logp"])
    given = {
        "input_ids": torch.zeros(mask.shape, dtype=torch.int64),
        "attention_mask": mask,
        "completion_mask": mask,
        "label": torch.tensor(data["desirable"]),
        "ref_logps": torch.tensor(data["reference"]),
        "ref_KL_logps": torch.tensor(data["kl_reference"]),
    }
    return KTOTrainer._compute_loss(own, model_of(logp), given, False), own._metrics["train"]


def of_means(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    means = torch.stack([row.mean() for row in rows])
    return means[0::2], means[1::2]


def shown(chosen: Tensor, rejected: Tensor) -> dict[str, Any]:
    """The metrics that get_batch_loss_metrics makes of both rewards."""
    return {
        "rewards/chosen": [chosen.mean().item()],
        "rewards/rejected": [rejected.mean().item()],
        "rewards/accuracies": [(chosen > rejected).float().mean().item()],
        "rewards/margins": [(chosen - rejected).mean().item()],
    }


def cpo(
    data: dict[str, Any],
    rows: list[Tensor],
    *,
    beta: float,
    simpo_gamma: float = 0.0,
    label_smoothing: float = 0.0,
    loss_type: str = "simpo",
) -> tuple[Tensor, dict[str, Any]]:
    """SimPO; and DPO with label smoothing, which TRL's DPOTrainer does not have: its formula is that
    of CPO's sigmoid loss on log-ratios.
    """
    own = trainer(
        alpha=0.0,
        beta=beta,
        simpo_gamma=simpo_gamma,
        label_smoothing=label_smoothing,
        loss_type=loss_type,
    )
    given = of_means(rows)
    if loss_type == "sigmoid":
        ratios = torch.stack([row.sum() for row in rows]) - torch.tensor(data["reference"])
        given = ratios[0::2], ratios[1::2]
    losses, chosen, rejected = CPOTrainer.cpo_loss(own, *given)
    return losses.mean(), shown(chosen, rejected)


def orpo(data: dict[str, Any], rows: list[Tensor], *, beta: float) -> tuple[Tensor, dict[str, Any]]:
    """The odds ratio is TRL's; the mean -log p of each chosen response is added here. TRL takes the
    mean over the prompts' and the responses' tokens of a batch.
    """
    losses, chosen, rejected, _, log_odds = ORPOTrainer.odds_ratio_loss(
        trainer(beta=beta), *of_means(rows)
    )
    found = shown(chosen, rejected) | {"log_odds_chosen": [log_odds.item()]}
    return -of_means(rows)[0].mean() - losses.mean(), found


CASES: list[tuple[str, dict[str, float], Any]] = [
    ("dpo", {"beta": 0.3}, lambda *x: dpo(*x, loss_types=["sigmoid"], beta=0.3)),
    ("dpo", {"beta": 0.2, "label_smoothing": 0.15},
     lambda *x: cpo(*x, loss_type="sigmoid", beta=0.2, label_smoothing=0.15)),
    ("ipo", {"beta": 0.4}, lambda *x: dpo(*x, loss_types=["ipo"], beta=0.4)),
    ("kto", {"beta": 0.25, "desirable_weight": 1.3, "undesirable_weight": 0.7},
     lambda *x: kto(*x, beta=0.25, desirable_weight=1.3, undesirable_weight=0.7)),
    ("simpo", {"beta": 2.2, "gamma": 0.9}, lambda *x: cpo(*x, beta=2.2, simpo_gamma=0.9)),
    ("orpo", {"coef": 0.35}, lambda *x: orpo(*x, beta=0.35)),
]  # fmt: skip


def case(name: str, options: dict[str, float], loss_of: Any, data: dict[str, Any]) -> Any:
    rows = [torch.tensor(row, requires_grad=True) for row in data["logp"]]
    loss, metrics = loss_of(data, rows)
    loss.backward()
    return {
        "type": name,
        "options": options,
        "loss": loss.item(),
        "gradient": [row.grad.tolist() for row in rows if row.grad is not None],
        "metrics": {name: values[-1] for name, values in metrics.items() if "/" in name or name == "kl"},
    }  # fmt: skip


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    given = drawn()
    cases = [case(*each, given) for each in CASES]
    FILE.write_text(json.dumps({"trl": trl.__version__, "data": given, "cases": cases}) + "\n")
