"""Checks of the options of teachers (algorithm.teachers)."""

from pathlib import Path

from rftmega.config.addresses import address_of
from rftmega.config.options.teachers import Teacher, names_of
from rftmega.config.schema import RunConfig
from rftmega.config.teacher_config import config_of
from rftmega.config.validation.backend import of_section
from rftmega.config.validation.layout import layout

PLAIN = Teacher()


def teachers(config: RunConfig, world_size: int) -> list[str]:
    """Returns the problems of teachers: contradictions, and options without effect."""
    algorithm, found = config.algorithm, []
    names = names_of(algorithm.teachers)
    for name in sorted({name for name in names if names.count(name) > 1}):
        found.append(
            f"algorithm.teachers: two teachers are named {name}. Give each a name of its own."
        )
    for name, teacher in zip(names, algorithm.teachers, strict=True):
        reasons = _source(teacher) + _comparison(teacher) + _run(config, teacher)
        if teacher.loads:
            reasons += _layout(config, teacher, world_size)
        else:
            reasons += [
                f"{option} is for a teacher with a folder as path: nothing else reads it."
                for option in ("backend", "parallel")
                if getattr(teacher, option) != getattr(PLAIN, option)
            ]
        found += [f"algorithm.teachers: {name}: {reason}" for reason in reasons]
    learns = any(teacher.signal == "loss" for teacher in algorithm.teachers)
    if algorithm.policy_loss.type == "none" and not learns:
        found.append(
            "algorithm.policy_loss.type=none needs a teacher with signal=loss (algorithm.teachers): nothing would be learnt."
        )
    return found


def _source(teacher: Teacher) -> list[str]:
    if bool(teacher.path) == bool(teacher.addresses):
        return ["give it a path (a folder, a Hub model or self), or the addresses of its servers."]
    found = []
    if teacher.is_self and not teacher.prompt:
        found.append(
            "path=self needs prompt, a column with another prompt: the policy agrees with itself."
        )
    if teacher.vocabulary == "full" and not teacher.loads:
        what = "path=self" if teacher.is_self else "addresses"
        found.append(
            f"vocabulary=full needs a folder as path, whose LM head the run can read, not {what}. Set it to top_k or sampled."
        )
    for address in teacher.addresses:
        try:
            address_of(address)
        except ValueError as error:
            found.append(f"addresses: {address} is no address of a server: {error}.")
    if teacher.key_env and not teacher.addresses:
        found.append(f"key_env={teacher.key_env} needs addresses: nothing else reads it.")
    return found


def _comparison(teacher: Teacher) -> list[str]:
    found = []
    if teacher.signal == "advantage" and teacher.vocabulary != "sampled":
        found.append(
            f"signal=advantage needs vocabulary=sampled, not {teacher.vocabulary}: an advantage is of the sampled token."
        )
    if teacher.signal == "advantage" and teacher.divergence != "reverse_kl":
        found.append(
            f"signal=advantage needs divergence=reverse_kl, not {teacher.divergence}: it is the log-ratio's expectation."
        )
    if teacher.divergence == "jsd" and teacher.vocabulary == "sampled":
        found.append(
            "divergence=jsd needs vocabulary=full or top_k: the sampled token alone does not give the mixture."
        )
    if teacher.beta != PLAIN.beta and teacher.divergence != "jsd":
        found.append(f"beta={teacher.beta} needs divergence=jsd: nothing else reads it.")
    if teacher.top_k != PLAIN.top_k and teacher.vocabulary != "top_k":
        found.append(f"top_k={teacher.top_k} needs vocabulary=top_k: nothing else reads it.")
    if teacher.discount and teacher.signal != "advantage":
        found.append(f"discount={teacher.discount} needs signal=advantage: nothing else reads it.")
    return found


def _run(config: RunConfig, teacher: Teacher) -> list[str]:
    """Returns the problems of a teacher with other options of the run."""
    found = []
    if teacher.addresses and config.rollout.temperature != 1.0:
        found.append(
            f"addresses: servers give log-probs at temperature 1, and rollout.temperature={config.rollout.temperature}. Set it "
            "to 1, or give the teacher a path."
        )
    if teacher.probes:
        found += _probes(config, teacher)
    if teacher.prompt and config.environment.type != "single_turn":
        found.append(
            f"prompt={teacher.prompt} with environment.type={config.environment.type}: the environment makes prompts of its "
            "own. Take environment.type=single_turn, or leave prompt out."
        )
    return found


def _probes(config: RunConfig, teacher: Teacher) -> list[str]:
    """Returns the problems of completions with the teacher's prompt."""
    said, found = f"probes={teacher.probes}", []
    if not teacher.is_self:
        found.append(
            f"{said} needs path=self: the run's engines hold the policy alone. For another teacher give its scores as a column "
            "(gate; rftmega evaluate --keep-scores)."
        )
    if teacher.gate:
        found.append(f"{said} with gate={teacher.gate}: both are the gate. Leave one of them out.")
    if config.trainer.max_staleness or config.rollout.ahead:
        found.append(
            f"{said} needs a synchronous run: engines that are generating can't be asked. Set trainer.max_staleness=0 and "
            "rollout.ahead=0."
        )
    if config.reward.scoring_models():
        found.append(
            f"{said} with reward or cost models: these score the completions that are trained on alone. Leave probes out."
        )
    return found


def _layout(config: RunConfig, teacher: Teacher, world_size: int) -> list[str]:
    found = layout(teacher.parallel, world_size)
    if not (Path(teacher.path) / "config.json").is_file():
        found.append(f"path={teacher.path} holds no config.json. Give a Hugging Face folder.")
    return found + of_section(config_of(config, teacher), "", world_size)
