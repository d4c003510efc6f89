"""Evaluates a model, or all exported policies of a run, as the run itself does: the same prompts, chat
template, sampling, seeds, rewards and environment. Prints pass@1, avg@n, pass@k and maj@k with 95 %
confidence intervals.

    rftmega evaluate runs/demo                                     # the run's policies, with its options
    rftmega evaluate runs/demo --data hard=hard.jsonl --samples 16 --k 1,4,16 trainer.eval_temperature=1
    rftmega evaluate Qwen/Qwen3-0.6B --data test.jsonl --rewards math --by level
    rftmega evaluate MODEL --adapter runs/demo/policy_adapter --config run.yaml
    rftmega evaluate MODEL --config run.yaml --rewards my_rewards.py:correct rollout.engine=transformers

Every option of a run may follow as option=value (train_rl.py --help lists them); those that only
training reads have no effect. Sampling is trainer.eval_temperature (0: greedy), eval_top_p,
eval_top_k, eval_min_p; rollout.engine names the engine, and strategy=separate with rollout.addresses
uses running servers. Results are in OUTPUT/evaluation.json and evaluation.html, completions in
OUTPUT/completions. An evaluation that broke off goes on with the same command; so does one with more
--samples.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rftmega.core.errors import ConfigError, exit_code_of
from rftmega.run import api
from rftmega.run.hub import fetched
from rftmega.runtime.parallel.private import keep_private


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        usage="%(prog)s MODEL [--data FILE] [--rewards R] [option=value ...] [...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", metavar="MODEL", help="Hugging Face folder, model of the Hub, or a run's folder"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="option=value", default=[], help="options of a run"
    )
    parser.add_argument("--adapter", default="", metavar="PEFT_DIR", help="LoRA adapters to add")
    parser.add_argument(
        "--config", type=Path, metavar="YAML", help="options of a run (of a run's folder: its own)"
    )
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="[NAME=]FILE",
        help="prompts; several files need names (data.eval, data.evals)",
    )
    parser.add_argument(
        "--rewards",
        action="append",
        default=[],
        metavar="R",
        help="math, multiple_choice, code, exact_match or FILE.py:function; the first one judges (trainer.eval_accuracy)",
    )
    parser.add_argument("--by", default="", metavar="COLUMN", help="also by values of this column")
    parser.add_argument(
        "--samples", type=int, metavar="N", help="completions per prompt (trainer.eval_samples)"
    )
    parser.add_argument(
        "--k",
        type=_numbers,
        default=[],
        metavar="K,K",
        help="k of pass@k and maj@k; N is always one",
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="for results")
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="JSONL",
        help="write the data with each right completion as response, for supervised fine-tuning",
    )
    parser.add_argument(
        "--keep-scores",
        type=Path,
        metavar="JSONL",
        help="write the data with the mean reward of each prompt as mean_score",
    )
    parser.add_argument("--part", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    return exit_code_of(evaluate, parser.parse_intermixed_args(given))


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def evaluate(chosen: argparse.Namespace) -> int:
    keep_private()
    api.prepare(logs=sys.stderr)
    from rftmega.run.evaluation import options

    options.refuse_processes()
    candidates = options.candidates_of(chosen.model)
    run = Path(chosen.model) if options.is_run(chosen.model) else None
    if chosen.adapter and len(candidates) > 1:
        raise ConfigError(
            f"--adapter: {chosen.model} is a run with {len(candidates)} models. Give one of their folders."
        )
    source: Any = chosen.config or (options.stored_options(run) if run else {})
    output = chosen.output or (run / "evaluation" if run else _output_of(candidates[0].label))
    overrides = options.overrides_of(chosen.data, chosen.rewards, chosen.samples, chosen.k)
    config = fetched(
        options.loaded(source, candidates[0].folder, str(output), [*overrides, *chosen.overrides])
    )
    if len(candidates) == 1:
        candidates = [candidates[0]._replace(folder=config.model.path)]
    api.check(config, None)
    with api.folders_locked(config), api.quiet_imports():
        results = _results(chosen, config, candidates, output)
    sys.stdout.write(
        json.dumps(results, indent=2) + "\n" if chosen.json else _told(results, output)
    )
    return 0


def _output_of(label: str) -> Path:
    return Path("runs") / f"evaluation-{label}"


def _results(chosen: argparse.Namespace, config: Any, candidates: Any, output: Path) -> Any:
    """Evaluates and writes the results. Returns them."""
    from rftmega.monitoring.observers.output_files import writing
    from rftmega.run.evaluation.evaluate import EvaluationTask, begin
    from rftmega.run.evaluation.evaluate import evaluate as evaluated
    from rftmega.run.evaluation.inputs import inputs_of
    from rftmega.run.evaluation.results import page_of
    from rftmega.run.evaluation.training_data import refuse_existing

    if len(candidates) > 1 and (chosen.keep or chosen.keep_scores):
        raise ConfigError(
            f"--keep: {chosen.model} is a run with {len(candidates)} models. Give one of their folders."
        )
    refuse_existing(chosen.keep, chosen.keep_scores)
    keeps = bool(chosen.keep or chosen.keep_scores)
    task = EvaluationTask.read(config, chosen.by, columns=keeps)
    begin(output, config, inputs_of(config, candidates, chosen.adapter))
    models = evaluated(task, candidates, chosen.adapter, output, part=chosen.part)
    results = {"model": chosen.model, "adapter": chosen.adapter, "by": chosen.by, "models": models}
    if keeps:
        _keep(chosen, config, task, output / "completions" / f"{candidates[0].label}.jsonl")
    with writing(output):
        (output / "evaluation.json").write_text(json.dumps(results, indent=2) + "\n")
        page = page_of(f"Evaluation of {chosen.model}", models)
        (output / "evaluation.html").write_text(page, encoding="utf-8")
    return results


def _keep(chosen: argparse.Namespace, config: Any, task: Any, stored: Path) -> None:
    """Writes the files of --keep and --keep-scores from the completions in `stored`."""
    from rftmega.monitoring.observers.assemble import answering_of
    from rftmega.run.evaluation import training_data

    found = training_data.completions_in(stored)
    if chosen.keep:
        records = training_data.kept(
            task.prompts,
            found,
            judge=answering_of(config).accuracy,
            response_key=config.data.response_key,
        )
        count = training_data.write(chosen.keep, records)
        sys.stderr.write(f"{chosen.keep}: {count} right completions\n")
    if chosen.keep_scores:
        count = training_data.write(chosen.keep_scores, training_data.scored(task.prompts, found))
        sys.stderr.write(f"{chosen.keep_scores}: {count} prompts with mean_score\n")


def _told(results: Any, output: Path) -> str:
    from rftmega.run.evaluation.results import text_of

    return text_of(results["models"]) + f"written: {output}/evaluation.json, evaluation.html\n"


if __name__ == "__main__":
    sys.exit(main())
