"""Compares a backend's model with transformers: log-probs, packed rows, and the exported folder."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rftmega.config import DataConfig, ModelConfig, RolloutConfig, RunConfig, TrainerConfig
from rftmega.converters import has_table, left_out
from rftmega.core.json_files import read_json_object
from rftmega.core.types import Rows
from rftmega.models.hf.hf_folder import HFFolder
from rftmega.run.model_check import reference
from rftmega.run.model_check.findings import Finding, note, ok, problem, raised, skipped
from rftmega.run.placement.export import export
from rftmega.run.train import built_backend
from rftmega.runtime.parallel import process_group

TOLERANCE = 1e-4  # of log-probs in float32
LARGE = 30.0  # logits beyond which the tolerance grows with them: float32 has 24 bits
LENGTHS = (17, 3, 29)
LONG, MOST = 40, 560  # tokens of the longest row: more than a sliding window, up to MOST
PROMPT = 1
SCALES = 400  # factors that are tried where logits differ
STAGES = ("log-probs", "packing", "export")


class Compared(NamedTuple):
    """Compared holds the rows that backends are compared on, with transformers' logits of each
    (None: transformers has no such model).
    """

    rows: Rows[Tensor]
    logits: list[Tensor] | None
    uneven: float = 0.0  # by how much transformers' log-probs change with the tokens behind them


def rows_for(config: Mapping[str, Any], vocabulary: int, positions: int) -> Rows[Tensor]:
    """Returns random rows of several lengths. `config`: config.json, flattened; `positions`: the most
    tokens that the model takes.
    """
    window = config.get("sliding_window")
    within = isinstance(window, int) and window + 16 <= MOST
    longest = window + 16 if within and window > LONG else LONG  # type: ignore[operator]
    lengths = torch.tensor([min(each, positions) for each in (*LENGTHS, longest)])
    special = {
        value for name, value in config.items() if name.endswith("_token_id") and _is_id(value)
    }
    special |= {
        value for name, value in config.items() if name.endswith("_token_index") and _is_id(value)
    }
    allowed = torch.tensor([each for each in range(vocabulary) if each not in special])
    drawn = torch.Generator().manual_seed(4711)
    chosen = torch.randint(len(allowed), (len(lengths), int(lengths.max())), generator=drawn)
    tokens = allowed[chosen] * (torch.arange(int(lengths.max())) < lengths[:, None])
    return Rows.of_completions(tokens, torch.full_like(lengths, PROMPT), lengths)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def row_of(rows: Rows[Tensor], number: int) -> Tensor:
    return rows.tokens[number, : int(rows.lengths[number])]


def expected(logits: Tensor, row: Tensor) -> Tensor:
    """Returns the log-probs [T - 1] of a row's tokens after the first, from logits [T, V]."""
    return logits[:-1].log_softmax(-1).gather(-1, row[1:, None])[:, 0]


def of_backend(
    backend: str, folder: Path, scratch: Path, given: Compared, ignored: Sequence[str]
) -> Iterator[Finding]:
    """Yields the findings about one backend's model of `folder`. `scratch`: an empty folder for its
    export. `ignored`: fields of config.json that are ignored.
    """
    config = RunConfig(
        backend=backend,  # type: ignore[arg-type]
        model=ModelConfig(path=str(folder), dtype="float32", ignore_config_fields=[*ignored]),
        data=DataConfig(train="none.jsonl"),
        rollout=RolloutConfig(),
        trainer=TrainerConfig(max_tokens_per_micro_batch=2 * MOST, output=str(scratch / "run")),
    )
    done = []
    try:
        with process_group.start():
            policy = built_backend(config).policy(config)
            own = _log_probs(policy, given.rows)
            done.append(of_itself(_against_transformers(own, given, folder), given.uneven))
            yield done[-1]
            done.append(of_itself(_packing(policy, given.rows, own), given.uneven))
            yield done[-1]
            export(policy, scratch / "exported", config.trainer)
            policy.residency.finish()
            del policy
        yield _export(folder, scratch / "exported", given)
    except Exception as error:  # foreign code, given a user's folder
        yield raised(STAGES[len(done)], error)
        yield from (
            skipped(each, f"{STAGES[len(done)]} failed") for each in STAGES[len(done) + 1 :]
        )


def of_itself(finding: Finding, uneven: float) -> Finding:
    """Turns a problem of a backend into a note if the comparison means nothing, since transformers'
    own log-probs change with later tokens, by `uneven`. Returns any other finding unchanged.
    """
    if finding.state != "problem" or uneven <= TOLERANCE:
        return finding
    said = f"Not comparable: transformers' own log-probs change by {uneven:.1e} with the tokens behind them (see logits). "
    return note(finding.check, said + finding.said)


def _log_probs(policy: Any, rows: Rows[Tensor]) -> list[Tensor]:
    """Returns the log-probs of each row's tokens after the first, of all rows packed together."""
    logp = policy.log_probs(rows).logp
    return [own[: int(length) - 1] for own, length in zip(logp, rows.lengths, strict=True)]


def _against_transformers(own: Sequence[Tensor], given: Compared, folder: Path) -> Finding:
    if given.logits is None:
        return skipped("log-probs", "transformers has no such model to compare with")
    config = read_json_object(folder / "config.json")
    rows = [row_of(given.rows, number) for number in range(len(own))]
    return of_log_probs(own, given.logits, rows, config)


def of_log_probs(
    own: Sequence[Tensor], logits: Sequence[Tensor], rows: Sequence[Tensor], config: dict[str, Any]
) -> Finding:
    """Returns a finding about log-probs `own` [T - 1] of `rows` [T] against logits [T, V] of
    transformers, with the likely cause of a difference.
    """
    theirs = [expected(*each) for each in zip(logits, rows, strict=True)]
    gaps = [(mine - other).abs() for mine, other in zip(own, theirs, strict=True)]
    largest = max((float(gap.max()) for gap in gaps if len(gap)), default=0.0)
    bound = TOLERANCE * max(1.0, max(float(each.abs().max()) for each in logits) / LARGE)
    tokens = sum(map(len, gaps))
    if largest <= bound:
        return ok("log-probs", f"{largest:.1e} at most from transformers, {tokens} tokens, float32")
    said = f"They differ from transformers by up to {largest:.1e} (more than {bound:.0e})"
    return problem(
        "log-probs",
        f"{said}: {_cause(own, logits, rows, gaps, bound)}",
        "Don't train with this backend; report the model's config.json.",
    )


def _cause(
    own: Sequence[Tensor],
    logits: Sequence[Tensor],
    rows: Sequence[Tensor],
    gaps: Sequence[Tensor],
    bound: float,
) -> str:
    if not all(bool(each.isfinite().all()) for each in own):
        return "some are NaN or infinite."
    factor = scale_between(own, logits, rows)
    if factor is not None:
        return (
            f"logits are {factor:.3g} times transformers': a factor of logits, embeddings or residuals in config.json "
            "(logits_scaling, logit_scale, embedding_multiplier) is read otherwise."
        )
    firsts = [int((gap > bound).nonzero()[0, 0]) for gap in gaps if bool((gap > bound).any())]
    if all(first == 0 for first in firsts):
        return "from the first token on, so embedding, norms, MLP or output head are computed otherwise."
    return (
        f"the first {min(first for first in firsts if first)} token(s) of a row agree, later ones do not, so attention, rotary "
        "embeddings or a sliding window are computed otherwise."
    )


def scale_between(
    own: Sequence[Tensor], logits: Sequence[Tensor], rows: Sequence[Tensor]
) -> float | None:
    """Returns the factor other than 1 of transformers' logits with which they give the log-probs
    `own`; None if no factor does.
    """
    every = torch.cat([each[:-1] for each in logits])
    targets = torch.cat([row[1:] for row in rows])[:, None]
    wanted = torch.cat(list(own))
    picked = every.gather(-1, targets)[:, 0]

    def gap(factor: float) -> float:
        return float((factor * picked - (factor * every).logsumexp(-1) - wanted).abs().mean())

    factors = [math.exp(each) for each in torch.linspace(-4.6, 4.6, SCALES).tolist()]
    best = min(factors, key=gap)
    step = factors[1] / factors[0]
    for _ in range(30):  # narrow the interval around the best one
        step = step**0.7
        best = min((best / step, best, best * step), key=gap)
    close = gap(best) < 1e-3 * max(1.0, float(wanted.abs().mean()))
    return best if close and abs(math.log(best)) > 1e-3 and gap(1.0) > 2 * gap(best) else None


def _packing(policy: Any, rows: Rows[Tensor], packed: Sequence[Tensor]) -> Finding:
    gaps = [0.0]
    for number, own in enumerate(packed):
        (alone,) = _log_probs(policy, rows.select(torch.tensor([number])))
        gaps.append(float((alone - own).abs().max()) if len(own) else 0.0)
    if max(gaps) <= TOLERANCE:
        return ok(
            "packing",
            f"{len(packed)} rows in one micro-batch: {max(gaps):.1e} at most from single rows",
        )
    worst = gaps.index(max(gaps)) - 1
    return problem(
        "packing",
        f"Row {worst} of {len(packed)} has log-probs that differ by {max(gaps):.1e} from those of the row alone: tokens of "
        "one row change another.",
        "Don't train with this backend; report the model's config.json.",
    )


def _export(folder: Path, exported: Path, given: Compared) -> Finding:
    """Returns a finding about an exported folder: each tensor equals the source's, or transformers
    computes the same logits with it.
    """
    before, after = HFFolder(folder), HFFolder(exported)
    config = read_json_object(folder / "config.json")
    names, found = set(before.names), set(after.names)
    missing = sorted(names - found - _unread(config, names))
    added = sorted(found - names)
    changed = [name for name in sorted(names & found) if not _equal(before, after, name)]
    if not missing and not added and not changed:
        return ok("export", f"{len(found)} tensors, each equal to the folder's")
    said = "; ".join(
        f"{len(some)} tensor(s) {what}, {some[0]!r} first"
        for some, what in ((missing, "are missing"), (added, "are new"), (changed, "differ"))
        if some
    )
    if given.logits is None:
        return problem("export", f"{said}.", "Report the model's config.json.")
    largest, unread = _reloaded(exported, given)
    if largest <= TOLERANCE and not unread:
        return ok("export", f"transformers' logits of it are equal ({largest:.1e}); {said}")
    return problem(
        "export",
        f"{said}; transformers' logits of the exported folder differ by {largest:.1e}{unread}.",
        "Report the model's config.json.",
    )


def _unread(config: dict[str, Any], names: set[str]) -> set[str]:
    """Returns the names of the folder's tensors that an export leaves out."""
    found = {"lm_head.weight"} if config.get("tie_word_embeddings", False) else set()
    return found | (left_out(config, names) if has_table(config) else set())


def _equal(before: HFFolder, after: HFFolder, name: str) -> bool:
    shape = before.shape_of(name)
    if after.shape_of(name) != shape:
        return False
    one, other = (folder.whole(name, shape, integers=None) for folder in (before, after))
    if not one.is_floating_point():
        return torch.equal(one, other)
    return torch.equal(one.float(), other.float())


def _reloaded(folder: Path, given: Compared) -> tuple[float, str]:
    """Returns the largest difference of logits of an exported folder from the reference, and a text
    about tensors that transformers did not find or did not read; "" if there are none.
    """
    assert given.logits is not None
    model, told = reference.loaded(folder)
    gaps = [
        float((reference.logits_of(model, row_of(given.rows, number)) - logits).abs().max())
        for number, logits in enumerate(given.logits)
    ]
    unread = [*told.get("missing_keys", ()), *told.get("unexpected_keys", ())]
    return max(gaps), f", and it does not find or read {unread[0]!r}" if unread else ""
