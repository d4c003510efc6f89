"""Shows why a run stopped with exit code 77: the log-probs of engine and trainer for the same
tokens, and which of the two is wrong.

    rftmega replay runs/demo/gap/step_000012                        # cause, weights, the tokens that differ most
    rftmega replay runs/demo/gap/step_000012 --model runs/v12/hf    # and transformers' log-probs of them, in float32

The folder is the one that the run named (docs/push.md). --model must hold the weights that
generated the completions: for step 0 those of model.path (the default if it still exists), for a
later step those that a checkpoint of that step exports.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rftmega.algorithms.mismatch import gaps_of, log_prob_gap
from rftmega.config.secrets import resolved
from rftmega.core.errors import CheckpointError, exit_code_of
from rftmega.trainer.logprob_mismatch.bundle import GapBundle
from rftmega.trainer.logprob_mismatch.causes import cause_of

ENGINE_WRONG, TRAINER_WRONG = "the engine is wrong", "the trainer is wrong"


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="the folder that the run named")
    parser.add_argument(
        "--model",
        type=Path,
        metavar="HF_DIR",
        help="the policy's weights of that step, for transformers to score",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=10,
        metavar="N",
        help="show the N tokens that differ most (10)",
    )
    return exit_code_of(replay, parser.parse_args(given))


def replay(chosen: argparse.Namespace) -> int:
    bundle = GapBundle.load(chosen.bundle)
    folder = chosen.model or model_of_the_start(bundle)
    say = sys.stdout.write
    for line in summary(bundle):
        say(line + "\n")
    for line in worst_tokens(bundle, chosen.tokens):
        say(line + "\n")
    if folder is None:
        say("which one   not known: give --model, the weights of that step\n")
        return 0
    model = loaded(folder)
    for line in against_transformers(bundle, model):
        say(line + "\n")
    return 0


def summary(bundle: GapBundle) -> list[str]:
    """Returns lines about the log-prob mismatch, its likely cause, and the weight slices whose
    checksums differ. `bundle`: the tokens and evidence that the run stored.
    """
    evidence, limits = bundle.evidence, bundle.limits
    cause = cause_of(evidence, limits)
    whole = evidence.whole
    broken = [each for each in evidence.checksums if not each.intact]
    lines = [
        f"step        {bundle.step}, {bundle.dtype}, temperature {bundle.temperature:g}",
        f"gap         99.9th percentile {whole.percentile:.3g} (limit {limits.percentile:g}), mean {whole.mean:.3g} (limit "
        f"{limits.mean:g}), median {whole.median:.3g}, of {whole.tokens} tokens; {evidence.share_beyond:.2%} beyond",
        f"cause       {cause.kind}: {cause.why}",
    ]
    if evidence.after_push is not None:
        after = evidence.after_push
        lines.append(
            f"new push    99.9th percentile {after.percentile:.3g}, mean {after.mean:.3g}, of {after.tokens} tokens"
        )
    lines.append(
        f"weights     {len(evidence.checksums)} slices, {len(broken)} not as the trainer holds them"
    )
    for each in broken:
        box = ", ".join(f"{start}:{stop}" for start, stop in each.box)
        lines.append(
            f"            {each.name}[{box}] process {each.source} to {each.target}: "
            f"held {shown(each.held)}, sent {shown(each.sent)}, received {shown(each.received)}"
        )
    return lines


def shown(checksum: int | None) -> str:
    return "nothing" if checksum is None else f"{checksum % 2**64:016x}"


def worst_tokens(bundle: GapBundle, most: int) -> list[str]:
    """Returns a heading, and a line for each of the `most` tokens of the bundle with the largest
    log-prob mismatch.
    """
    evidence, rows = bundle.evidence, bundle.rows
    places = evidence.mask.nonzero()
    gap = gaps_of(evidence.behaviour_logp, evidence.old_logp, evidence.mask)
    lines = ["tokens      row  place  token  version    engine   trainer       gap"]
    for number in gap.argsort(descending=True)[:most].tolist():
        row, place = places[number].tolist()
        lines.append(
            f"            {row:3d}  {place - int(rows.prompt_lengths[row]) + 1:5d}  {int(rows.tokens[row, place + 1]):5d}"
            f"  {int(bundle.versions[row, place]):7d}  {float(evidence.behaviour_logp[row, place]):8.4f}"
            f"  {float(evidence.old_logp[row, place]):8.4f}  {float(gap[number]):8.2g}"
        )
    return lines


def model_of_the_start(bundle: GapBundle) -> Path | None:
    """Returns the folder of the model that the run started from, if its weights generated the
    bundle's completions (step 0) and it still exists; otherwise None.
    """
    folder = Path(resolved(bundle.config, "model.path"))
    return folder if bundle.step == 0 and (folder / "config.json").is_file() else None


def loaded(folder: Path) -> Any:
    """Returns the transformers model in `folder`, loaded in float32. Raises CheckpointError if
    transformers can't read it.
    """
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=False
        ).eval()
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"--model {folder} can't be read by transformers: {error}") from error


@torch.no_grad()
def against_transformers(bundle: GapBundle, model: Any) -> list[str]:
    """Returns lines with the log-prob differences of engine and trainer from the transformers model
    `model` and, for a MoE, the router margins of the tokens that differ most.
    """
    evidence, rows = bundle.evidence, bundle.rows
    found = torch.zeros_like(evidence.old_logp)
    margins = torch.full_like(evidence.old_logp, torch.inf)
    for row in range(len(rows)):
        ids = rows.tokens[row, : rows.lengths[row]]
        out = model(ids[None], **({"output_router_logits": True} if evidence.has_experts else {}))
        logp = (
            (out.logits[0, :-1].float() / bundle.temperature)
            .log_softmax(-1)
            .gather(-1, ids[1:, None])[:, 0]
        )
        found[row, : len(logp)] = logp
        if evidence.has_experts:
            margins[row, : len(logp)] = margins_of(
                out.router_logits, model.config.num_experts_per_tok, len(ids)
            )[:-1]
    engine = log_prob_gap(evidence.behaviour_logp, found, evidence.mask)
    trainer = log_prob_gap(evidence.old_logp, found, evidence.mask)
    wrong = ENGINE_WRONG if engine.mean > trainer.mean else TRAINER_WRONG
    lines = [
        f"oracle      engine differs from transformers by {engine.mean:.3g} (mean) and {engine.largest:.3g} (largest), the "
        f"trainer by {trainer.mean:.3g} and {trainer.largest:.3g}",
        f"which one   {wrong}",
    ]
    if evidence.has_experts:
        beyond = evidence.mask & (
            (evidence.behaviour_logp - evidence.old_logp).abs() > bundle.limits.percentile
        )
        lines.append(
            f"routes      margin between the last chosen expert and the next: median {margins[evidence.mask].median():.2g}, of "
            f"the tokens beyond the limit {margins[beyond].median() if bool(beyond.any()) else torch.nan:.2g}"
        )
    return lines


def margins_of(router_logits: Any, chosen: int, tokens: int) -> Tensor:
    """Returns, for each token, the smallest difference of router probability between the last
    chosen expert and the next, over all layers and over this and earlier tokens. Shape: [tokens].

    `router_logits`: one tensor [tokens, experts] per layer; `chosen`: number of experts per token.
    """
    smallest = torch.full((tokens,), torch.inf)
    for logits in router_logits:
        ranked = logits.float().softmax(-1).sort(descending=True).values
        smallest = torch.minimum(smallest, ranked[:tokens, chosen - 1] - ranked[:tokens, chosen])
    return smallest.cummin(0).values


if __name__ == "__main__":
    sys.exit(main())
