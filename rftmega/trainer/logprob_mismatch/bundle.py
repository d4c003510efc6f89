"""GapBundle is a folder with the evidence of a step with a log-prob mismatch between engine and
trainer.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from rftmega.algorithms.mismatch import Gap
from rftmega.core.errors import DataError
from rftmega.core.types import Rows, SliceChecksums
from rftmega.trainer.logprob_mismatch.causes import Evidence, Limits

ABOUT, TENSORS = "bundle.json", "tensors.safetensors"
RESCORED = "rescored_logp_"  # before the number of a scoring pass
FORMAT = 2  # since 2 it has the mask


@dataclass(frozen=True, slots=True)
class GapBundle:
    """GapBundle holds the rows of a step with the largest log-prob mismatch and the evidence
    collected to diagnose it.
    """

    step: int
    temperature: float
    dtype: str  # of the trainer's forward pass
    limits: Limits
    rows: Rows
    versions: Tensor  # [B, T] int64: the version that sampled each token, -1 outside the response
    evidence: Evidence
    config: dict[str, Any]  # without secrets

    def save(self, folder: Path) -> None:
        """Writes the bundle to a folder that only its owner can read, since it contains prompts and
        completions.
        """
        folder.mkdir(parents=True, mode=0o700, exist_ok=True)
        evidence = self.evidence
        tensors = {
            "tokens": self.rows.tokens,
            "prompt_lengths": self.rows.prompt_lengths,
            "lengths": self.rows.lengths,
            "mask": self.rows.mask,
            "versions": self.versions,
            "behaviour_logp": evidence.behaviour_logp,
            "old_logp": evidence.old_logp,
            "other_prompt": evidence.other_prompt,
        }
        if evidence.untempered_logp is not None:
            tensors["untempered_logp"] = evidence.untempered_logp
        if evidence.alone_logp is not None:
            tensors["alone_logp"] = evidence.alone_logp
        tensors |= {f"{RESCORED}{n}": logp for n, logp in enumerate(evidence.rescored)}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / TENSORS)
        about = {
            "format": FORMAT,
            "step": self.step,
            "temperature": self.temperature,
            "dtype": self.dtype,
            "limits": self.limits._asdict(),
            "gap": evidence.whole._asdict(),
            "share_beyond": evidence.share_beyond,
            "gap_after_another_push": None
            if evidence.after_push is None
            else evidence.after_push._asdict(),
            "has_experts": evidence.has_experts,
            "config": self.config,
            "checksums": [asdict(each) for each in evidence.checksums],
        }
        (folder / ABOUT).write_text(json.dumps(about, indent=1) + "\n")

    @staticmethod
    def load(folder: Path) -> "GapBundle":
        """Returns the bundle that `save` wrote. Raises DataError if the folder has no bundle."""
        try:
            about = json.loads((folder / ABOUT).read_text())
            tensors = load_file(folder / TENSORS)
            if about["format"] not in (1, FORMAT):
                raise DataError(
                    f"{folder} is a bundle of format {about['format']}; this version reads {FORMAT}."
                )
            return _built(about, tensors)
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{folder} holds no bundle of a gap ({type(error).__name__}: {error}). Give the folder that the run named, "
                f"which has {ABOUT} and {TENSORS}."
            ) from None


def _built(about: dict[str, Any], tensors: dict[str, Tensor]) -> GapBundle:
    laid_out = tensors["tokens"], tensors["prompt_lengths"], tensors["lengths"]
    rows = Rows(*laid_out, tensors["mask"]) if "mask" in tensors else Rows.of_completions(*laid_out)
    after = about["gap_after_another_push"]
    evidence = Evidence(
        whole=Gap(**about["gap"]),
        share_beyond=about["share_beyond"],
        mask=rows.mask,
        behaviour_logp=tensors["behaviour_logp"],
        old_logp=tensors["old_logp"],
        untempered_logp=tensors.get("untempered_logp"),
        other_prompt=tensors["other_prompt"],
        after_push=None if after is None else Gap(**after),
        checksums=[_checksums(each) for each in about["checksums"]],
        has_experts=about["has_experts"],
        rescored=tuple(tensors[name] for name in sorted(tensors) if name.startswith(RESCORED)),
        alone_logp=tensors.get("alone_logp"),
    )
    return GapBundle(
        step=about["step"],
        temperature=about["temperature"],
        dtype=about["dtype"],
        limits=Limits(**about["limits"]),
        rows=rows,
        versions=tensors["versions"],
        evidence=evidence,
        config=about["config"],
    )


def rows_under_other_prompts(rows: Rows) -> tuple[Rows, Tensor]:
    """Combines each completion with the prompts of all other rows. Returns the new rows, and an
    int64 tensor [new rows, 2] of pairs (row of the completion, row of the prompt) in `rows`.

    Other rows with the completion's own prompt are left out.
    """
    made: list[tuple[Tensor, Tensor, int]] = []  # tokens and mask of each, prompt length
    pairs: list[tuple[int, int]] = []
    for completion in range(len(rows)):
        begin, end = int(rows.prompt_lengths[completion]), int(rows.lengths[completion])
        response, chosen = (
            rows.tokens[completion, begin:end],
            rows.mask[completion, begin - 1 : end - 1],
        )
        for other in range(len(rows)):
            prompt = rows.tokens[other, : rows.prompt_lengths[other]]
            if other != completion and not torch.equal(prompt, rows.tokens[completion, :begin]):
                mask = functional.pad(chosen, (len(prompt) - 1, 0))
                made.append((torch.cat([prompt, response]), mask, len(prompt)))
                pairs.append((completion, other))
    width = max((len(tokens) for tokens, *_ in made), default=1)
    canvas = torch.zeros(len(made), width, dtype=torch.int64)
    masks = torch.zeros(len(made), width - 1, dtype=torch.bool)
    for row, (tokens, mask, _) in enumerate(made):
        canvas[row, : len(tokens)] = tokens
        masks[row, : len(mask)] = mask
    starts = torch.tensor([start for *_, start in made], dtype=torch.int64)
    ends = torch.tensor([len(tokens) for tokens, *_ in made], dtype=torch.int64)
    return Rows(canvas, starts, ends, masks), torch.tensor(pairs, dtype=torch.int64).view(-1, 2)


def _checksums(said: dict[str, Any]) -> SliceChecksums:
    box = tuple((start, stop) for start, stop in said["box"])
    return SliceChecksums(**{**said, "box": box})
