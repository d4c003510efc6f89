"""Makes one HTML page of a run: curves of its metrics, a table of samples, and each response with
coloured tokens; and the completions of its evaluations.

    rftmega view runs/demo                                     # writes runs/demo/trajectories.html
    rftmega view runs/demo/trajectories/step_000100.jsonl.gz --output page.html --limit 500

A multi-turn response is shown turn by turn. Tokens are coloured by the log-prob mismatch between
engine and trainer, by advantage or by entropy; hovering shows the values. The page needs no network
and no server: it contains its data, so it can be shared. trainer.trajectories sets how often a run
writes the files that this program reads.
"""

import argparse
import base64
import gzip
import hashlib
import html
import json
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from rftmega.core.errors import DataError, exit_code_of
from rftmega.monitoring.history import curves_of
from rftmega.runtime.parallel.private import keep_private

TEMPLATE = Path(__file__).with_name("view.html")
SAMPLE = {"step": int, "group": int, "index": int, "prompt": str, "response": str, "label": str, "reward_parts": dict,
          "truncated": bool, "tokens": dict}  # fmt: skip
TOKENS = ("id", "text", "engine_logp", "trainer_logp", "gap", "advantage")
TEACHER = "teacher "  # begins the names of lists with log-ratios of teachers
# not in the table: tokens have their own elements, images are stored once, messages repeat text
LEFT_OUT = ("tokens", "images", "messages")
# smaller values are rounding errors, and should not be highlighted
SMALLEST_SCALE = {"gap": 0.01, "advantage": 1e-6, "entropy": 1e-6}


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "sources",
        type=Path,
        nargs="+",
        metavar="OUT_OR_FILES",
        help="a run's output folder, or files of it",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="PAGE",
        help="where to write (trajectories.html beside what is read)",
    )
    parser.add_argument(
        "--limit",
        type=int,
        default=5000,
        metavar="N",
        help="at most N samples of training, and as many of evaluations, of the last steps (5000)",
    )
    return exit_code_of(show, parser.parse_args(given))


def show(chosen: argparse.Namespace) -> int:
    keep_private()
    if chosen.limit < 1:
        raise DataError(f"--limit {chosen.limit} must be at least 1.")
    files = [path for source in chosen.sources for path in files_of(source)]
    samples, left_out = newest(files, chosen.limit)
    if not samples:
        raise DataError(f"{files[0]} holds no sample.")
    first = chosen.sources[0]
    target = chosen.output or (first if first.is_dir() else first.parent) / "trajectories.html"
    evaluations = sorted(first.glob("evaluations/step_*.jsonl.gz"))
    completions, _ = newest(evaluations, chosen.limit)
    text = page(
        samples + completions, f"Trajectories of {first}", curves_of(first / "metrics.jsonl")
    )
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DataError(
            f"{target} can't be written: {error.strerror}. Choose another --output."
        ) from error
    more = f", the last of more (--limit {chosen.limit})" if left_out else ""
    beside = f", {len(completions)} completions of evaluations" if completions else ""
    steps = f"steps {samples[0]['step']} to {samples[-1]['step']}"
    sys.stdout.write(
        f"wrote {target}: {len(samples)} samples of {steps}{more}{beside}, {len(text) / 1e6:.1f} MB\n"
    )
    return 0


def newest(files: Sequence[Path], limit: int) -> tuple[list[dict[str, Any]], bool]:
    """Returns up to `limit` samples of the last steps in `files`, in the order of the steps, and
    whether there are more.
    """
    newest_first = sorted(files, key=lambda path: path.name, reverse=True)
    found = chain.from_iterable(samples_of(path) for path in newest_first)
    samples = list(islice(found, limit))
    # stable: keeps the order within a step
    return sorted(samples, key=lambda sample: sample["step"]), next(found, None) is not None


def files_of(source: Path) -> list[Path]:
    """Returns the trajectory files in `source`, a run's folder, or `source` itself if it is a file.

    Raises DataError if there is none.
    """
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise DataError(
            f"There is no {source}. Give a run's output folder, or files of its trajectories."
        )
    found = sorted(source.glob("trajectories/step_*.jsonl.gz")) or sorted(
        source.glob("step_*.jsonl.gz")
    )
    if not found:
        raise DataError(
            f"{source} holds no trajectories/step_*.jsonl.gz. Was the run's trainer.trajectories 0?"
        )
    return found


def samples_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yields one sample per line of a file, gzipped or plain.

    Raises DataError, which names file and line, for an invalid sample.
    """
    number, groups = 0, dict[tuple[Any, ...], int]()
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):  # noqa: B007  the errors below name it
                if not line.strip():
                    continue
                sample = json.loads(line)
                if isinstance(sample, dict) and "sample" in sample and "set" in sample:
                    own = tuple(sample.get(key) for key in ("adapter", "set", "index"))
                    sample = of_evaluation(sample, groups.setdefault(own, len(groups)))
                yield checked(sample)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} is no whole gzip file ({error}).") from error
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror}.") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{path}:{number}: not JSON ({error}).") from error
    except DataError as error:
        raise DataError(f"{path}:{number}: no sample of a trajectory: {error}") from error


def of_evaluation(found: dict[str, Any], group: int) -> dict[str, Any]:
    """Returns a completion of an evaluation as a sample of the page, without its tokens. `group`:
    number of its prompt among those of the evaluation. Raises DataError if scores or tokens are
    invalid.
    """
    scores, ids = found.get("scores", {}), found.get("tokens", [])
    if not isinstance(scores, dict) or not isinstance(ids, list):
        raise DataError('"scores" is no object, or "tokens" no list.')
    names = (found.get("adapter"), found.get("set"))
    return {
        "evaluation": "_".join(str(name) for name in names if name) or "evaluation",
        "group": group,
        **{key: found.get(key) for key in ("step", "index", "prompt", "label")},
        "response": found.get("response", f"[lost: {found.get('lost')}]"),
        "reward": scores.get("reward"),
        "reward_parts": {name: value for name, value in scores.items() if name != "reward"},
        "truncated": found.get("truncated", False),
        "columns": found.get("columns", {}),
        "length": len(ids),
        "tokens": {name: [] for name in TOKENS},
    }


def checked(sample: Any) -> dict[str, Any]:
    """Returns `sample`, one trajectory of a file, after renaming fields of older files to their
    present names. Raises DataError if the page could not show it.
    """
    if not isinstance(sample, dict):
        raise DataError(f"a JSON {type(sample).__name__}, not an object.")
    for key, kind in SAMPLE.items():
        if not isinstance(sample.get(key), kind):
            raise DataError(f'"{key}" is missing or no {kind.__name__}.')
    tokens = sample["tokens"]
    given = [*TOKENS, *teachers_of(tokens)]
    given += ["entropy"] if tokens.get("entropy") is not None else []
    lengths = {len(tokens[key]) if isinstance(tokens.get(key), list) else -1 for key in given}
    if len(lengths) > 1 or -1 in lengths:
        raise DataError(f'"tokens" must hold lists of one length: {", ".join(given)}.')
    chosen = tokens.get("chosen", [True] * len(tokens["id"]))  # older files have no such list
    if not isinstance(chosen, list) or len(chosen) != len(tokens["id"]):
        raise DataError('"chosen" of "tokens" must be a list as long as the others.')
    numbers = [sample.get("reward"), *sample["reward_parts"].values()]
    numbers += [value for key in given if key != "text" for value in tokens[key]]
    if not all(value is None or isinstance(value, int | float) for value in numbers):
        raise DataError("a reward or a token's value is no number.")
    if not all(isinstance(text, str) for text in [*tokens["text"], sample.get("graded") or ""]):
        raise DataError("a token's text, or what was graded, is no string.")
    if "pictures" in sample:  # a line written before 2026-11-27
        sample["images"] = sample.pop("pictures")
    check_images(sample.get("images", []))
    check_rollout(sample)
    return sample


def check_rollout(sample: dict[str, Any]) -> None:
    """Raises DataError if the turns, measures, columns, messages or rollout numbers of a sample are invalid;
    all are optional, since older files lack them.
    """
    turns = sample.get("turns", [])
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise DataError('"turns" is no list of objects.')
    for turn in turns:
        if not all(isinstance(turn.get(key), str) for key in ("role", "name")):
            raise DataError('"role" or "name" of a turn is missing or no string.')
        start, stop, reward = (turn.get(key) for key in ("start", "stop", "reward"))
        if not (whole(start) and whole(stop) and start <= stop <= len(sample["tokens"]["id"])):
            raise DataError(f"a turn from {start} to {stop} is not among the tokens.")
        if reward is not None and not isinstance(reward, int | float):
            raise DataError("a turn's reward is no number.")
    measures = sample.get("measures", {})
    if not isinstance(measures, dict):
        raise DataError('"measures" is no object.')
    if not all(isinstance(value, int | float) for value in measures.values()):
        raise DataError("a measure is no number.")
    messages = sample.get("messages", [])
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise DataError('"messages" is no list of objects.')
    if not isinstance(sample.get("columns", {}), dict):
        raise DataError('"columns" is no object.')
    if not all(whole(sample.get(key, 0)) for key in ("rollout", "trajectory", "trajectories")):
        raise DataError('"rollout", "trajectory" or "trajectories" is no whole number.')
    if ("trajectory" in sample) != ("trajectories" in sample):
        raise DataError('of "trajectory" and "trajectories" one is missing.')


def whole(value: Any) -> bool:
    """Returns whether a value is a non-negative integer."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def check_images(images: Any) -> None:
    """Raises DataError unless `images`, the value of a sample's field "images", is a list that the
    page can show.
    """
    if not isinstance(images, list) or not all(isinstance(each, dict) for each in images):
        raise DataError('"images" is no list of objects.')
    for image in images:
        if not isinstance(image.get("digest"), str):
            raise DataError("an image has no digest.")
        if not re.fullmatch(r"[A-Za-z0-9+/]*=*", image.get("thumbnail") or ""):
            raise DataError("a thumbnail is no base64.")


def page(samples: Sequence[dict[str, Any]], title: str, curves: Any = None) -> str:
    """Returns the HTML of the page. `title`: its title; `curves`: metric -> its steps and values.

    Each sample has a separate element for its tokens, so that the browser parses only the tokens of
    samples that are viewed.
    """
    rows = []
    thumbnails: dict[str, str] = {}  # by digest
    for sample in samples:
        row = {key: value for key, value in sample.items() if key not in LEFT_OUT}
        for image in sample.get("images", []):
            thumbnails.setdefault(image["digest"], image.get("thumbnail") or "")
            size = (
                f"patches {image['grid']}" if "grid" in image else f"frames {image.get('frames')}"
            )
            said = f"{image.get('path') or 'bytes'}, {size}"
            row.setdefault("images", []).append([image["digest"], said])
        rows.append(summary(sample["tokens"]) | row)
    scale = {
        measure: scale_of([sample["tokens"] for sample in samples], measure)
        for measure in [*SMALLEST_SCALE, *_all_teachers(samples)]
    }
    held = {"samples": rows, "scale": scale, "thumbnails": thumbnails, "curves": curves or {}}
    blocks = [block("samples", held)]
    blocks += [block(f"tokens-{i}", sample["tokens"]) for i, sample in enumerate(samples)]
    template = TEMPLATE.read_text(encoding="utf-8")
    script = template.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    before, after = template.split("{{DATA}}")
    return (
        before.replace("{{HASH}}", f"sha256-{digest}").replace("{{TITLE}}", html.escape(title))
        + "\n".join(blocks)
        + after
    )


def teachers_of(tokens: dict[str, Any]) -> list[str]:
    """Returns the names of the lists with log-ratios of teachers."""
    return [name for name in tokens if name.startswith(TEACHER)]


def _all_teachers(samples: Sequence[dict[str, Any]]) -> list[str]:
    names = (name for sample in samples for name in teachers_of(sample["tokens"]))
    return list(dict.fromkeys(names))


def block(name: str, value: Any) -> str:
    return f'<script type="application/json" id="{name}">{embedded(value)}</script>'


def embedded(value: Any) -> str:
    """Returns `value` as JSON that is safe in a script element: ASCII, and without the characters
    that start or end markup.
    """
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def summary(tokens: dict[str, Any]) -> dict[str, float | int | None]:
    """Returns the number of tokens of a response ("length"), and its mean and largest log-prob
    mismatch ("gap", "gap_max"), for the table. `tokens`: list of values per token, by name.
    """
    gaps = [abs(gap) for gap in tokens["gap"] if gap is not None]
    mean = sum(gaps) / len(gaps) if gaps else None
    return {"length": len(tokens["id"]), "gap": mean, "gap_max": max(gaps, default=None)}


def scale_of(samples: Sequence[dict[str, Any]], measure: str) -> float:
    """Returns the value of `measure` (such as "gap") at which colours saturate: its 99th percentile
    over all tokens of `samples`, so that one outlier does not make all other tokens pale.
    """
    sizes = sorted(
        abs(value) for tokens in samples for value in tokens.get(measure) or () if value is not None
    )
    return max(sizes[len(sizes) * 99 // 100] if sizes else 0.0, SMALLEST_SCALE.get(measure, 0.01))


if __name__ == "__main__":
    sys.exit(main())
