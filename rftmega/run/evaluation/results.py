"""Results of an evaluation: estimates with confidence intervals by set and group, as JSON-serializable
objects, text and a page.
"""

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rftmega.algorithms.majority_at_k import Vote, majority_at_k
from rftmega.algorithms.pass_at_k import pass_at_k
from rftmega.monitoring.observers.evaluate import Answering, counted, judged, metric_of
from rftmega.run.evaluation.intervals import Estimate, estimate, share
from rftmega.run.evaluation.store import StoredCompletion

Prompts = Sequence[Sequence[StoredCompletion]]  # the completions of each prompt
WIDTH = 24  # characters of a column of text
STYLE = "body{font:15px system-ui;margin:2em}td,th{padding:.2em .8em;text-align:right}td:first-child{text-align:left}"


def run_metrics(name: str, prompts: Prompts, answering: Answering) -> dict[str, float]:
    """Returns the metrics that a run's own evaluation computes of the same completions, by the names
    that they have in metrics.jsonl. `name`: the evaluation set.
    """
    found = [each for completions in prompts for each in completions]
    parts = judged([each.scores for each in found], answering) | counted(found)
    return {metric_of(name, part): value for part, value in parts.items()}


def estimates(prompts: Prompts, answering: Answering) -> dict[str, Estimate]:
    """Returns the estimates of one set or group: pass@1, the mean of each reward component over n
    completions ("avg@<n> <component>"), pass@k and maj@k, for k = n and the k of `answering`.

    Lost completions (of rollouts that failed) don't count. pass@k and maj@k are means over the
    prompts with at least k completions that are not lost.
    """
    n, part = answering.samples, answering.accuracy
    kept = [[each for each in own if each.scores] for own in prompts]
    kept = [own for own in kept if own]
    found: dict[str, Estimate] = {}
    values = [[_right(each, part) for each in own] for own in kept]
    if values:
        found["pass@1"] = share([sum(own) / len(own) for own in values])
    for name in dict.fromkeys(name for own in kept for each in own for name in each.scores):
        means = [_mean([each.scores[name] for each in own if name in each.scores]) for own in kept]
        found[f"avg@{n} {name}"] = estimate([mean for mean in means if mean is not None])
    for k in sorted({*answering.pass_at, n} - {1}):
        enough = [own for own in kept if len(own) >= k]
        if enough:
            found[f"pass@{k}"] = share([_pass(own, part, k) for own in enough])
        if enough and any(each.answer is not None for own in enough for each in own):
            found[f"maj@{k}"] = share([_majority(own, part, k) for own in enough])
    return found


def _pass(own: Sequence[StoredCompletion], part: str, k: int) -> float:
    return pass_at_k(len(own), sum(_right(each, part) for each in own), k)


def _majority(own: Sequence[StoredCompletion], part: str, k: int) -> float:
    return majority_at_k([Vote(each.answer, _right(each, part)) for each in own], k)


def _right(found: StoredCompletion, part: str) -> int:
    return int(found.scores.get(part, 0) >= 1)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def grouped(
    prompts: Iterable[Sequence[StoredCompletion]], group_of: Callable[[StoredCompletion], str]
) -> dict[str, list[Sequence[StoredCompletion]]]:
    """Returns group name -> completions of each of the group's prompts, sorted by name. `group_of`
    returns the group of a completion.
    """
    found: dict[str, list[Sequence[StoredCompletion]]] = {}
    for own in prompts:
        found.setdefault(group_of(own[0]), []).append(own)
    return dict(sorted(found.items()))


def as_json(found: Mapping[str, Estimate]) -> dict[str, Any]:
    """Returns estimates as JSON objects: mean, ends of the 95 % interval and number of prompts."""
    return {
        name: {"mean": each.mean, "low": each.low, "high": each.high, "prompts": each.prompts}
        for name, each in found.items()
    }


def rows_of(models: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, dict[str, Any]]]:
    """Returns (model, set and group, name -> estimate) for each line of a table of results."""
    found = []
    for model in models:
        for name, own in model["sets"].items():
            found.append((model["model"], name or "all", own["all"]))
            found += [
                (model["model"], f"{name} {group}".strip(), each)
                for group, each in own["groups"].items()
            ]
    return found


def told(each: Mapping[str, Any] | None) -> str:
    """Returns an estimate as text."""
    if each is None:
        return "-"
    if each["low"] is None:
        return f"{each['mean']:.3f}"
    return f"{each['mean']:.3f} [{each['low']:.3f}, {each['high']:.3f}]"


def text_of(models: Sequence[Mapping[str, Any]]) -> str:
    """Returns the results as text for a terminal, one line per estimate."""
    lines = []
    for model, group, found in rows_of(models):
        prompts = max((each["prompts"] for each in found.values()), default=0)
        lines.append(f"{model}: {group} ({prompts} prompts)")
        lines += [f"  {name:<{WIDTH}} {told(each)}" for name, each in found.items()]
    return "\n".join(lines) + "\n"


def page_of(title: str, models: Sequence[Mapping[str, Any]]) -> str:
    """Returns the results as an HTML page with one table, which needs no network and no script."""
    rows = rows_of(models)
    names = list(dict.fromkeys(name for _, _, found in rows for name in found))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ("model", "prompts", *names))
    body = []
    for model, group, found in rows:
        cells = "".join(f"<td>{html.escape(told(found.get(name)))}</td>" for name in names)
        body.append(f"<tr><td>{html.escape(model)}</td><td>{html.escape(group)}</td>{cells}</tr>")
    return (
        f'<!doctype html><meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
        f"<h1>{html.escape(title)}</h1><p>Means over prompts, with 95 % confidence intervals.</p>"
        f"<table><tr>{head}</tr>{''.join(body)}</table>\n"
    )
