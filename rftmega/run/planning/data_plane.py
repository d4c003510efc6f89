"""Predicts the host memory of a step's rollouts, and the time to move them from the engines to the
micro-batches.
"""

from collections.abc import Mapping

from rftmega.config import RunConfig
from rftmega.config.options.teachers import names_of
from rftmega.core.expert_routes import kind_of
from rftmega.model_providers.description import Experts
from rftmega.run.planning.models import PlannedModel

COMPLETIONS = 4 + 1 + 4 + 4  # bytes per token: id, mask, log-prob, version of the policy
NUMBER = 4  # bytes of a log-prob, an entropy, a value, an advantage
# bytes per token while the log-prob mismatch of engine and trainer is computed: numbers in
# float64, their sorted copy, and their inputs
AT_WORK = 4 * 8


def tokens_of(config: RunConfig) -> int:
    """Returns the number of tokens in a step's rollouts if all have the maximum length."""
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    return config.trainer.prompts_per_step * config.rollout.samples_per_prompt * longest


def scored(config: RunConfig) -> int:
    """Returns how many numbers per token the models compute: log-prob and entropy of the policy,
    log-prob of the reference, value of the critic.
    """
    chosen = config.algorithm
    return 2 + (chosen.kl.coef > 0) + chosen.advantage.needs_critic


def of_routes(config: RunConfig, experts: Experts | None) -> int:
    """Returns the bytes per token of recorded expert routes (rollout.router_replay). `experts`: the
    experts of the policy, None if it is dense.
    """
    if experts is None or config.rollout.router_replay == "none":
        return 0
    return len(experts.layers) * experts.active * kind_of(experts.number).itemsize


def of_teachers(config: RunConfig, models: Mapping[str, PlannedModel]) -> int:
    """Returns the bytes of all teachers' scores per trained token, if every teacher teaches every
    row; `models`: the run's models by name.
    """
    teachers, found = config.algorithm.teachers, 0
    for name, teacher in zip(names_of(teachers), teachers, strict=True):
        found += NUMBER
        if teacher.vocabulary == "top_k":
            found += NUMBER * (2 * teacher.top_k + 1)
        if teacher.vocabulary == "full" and name in models:
            found += models[name].itemsize * models[name].model.hidden
    return found


def on_each_host(
    config: RunConfig,
    experts: Experts | None = None,
    models: Mapping[str, PlannedModel] | None = None,
) -> dict[str, int]:
    """Returns kind -> bytes of host memory that all processes of a host share: "rollout" (tokens
    and their data), "at_work" (while the log-prob mismatch is computed), "teachers" (their scores
    of the trained tokens), "replay" (the replay buffer).

    `experts`: experts of the policy, None if it is dense. `models`: the run's models by name.
    """
    chosen, tokens = config.algorithm, tokens_of(config)
    if chosen.task != "rl":
        return {}
    trained = 1 + chosen.advantage.needs_critic  # advantages, returns
    row = COMPLETIONS + NUMBER * (scored(config) + trained) + chosen.drop_truncated
    row += of_routes(config, experts)
    row += NUMBER * len(chosen.teachers)  # their log-probs, of every token
    found = {"rollout": row * tokens, "at_work": AT_WORK * tokens}
    if told := of_teachers(config, models or {}):
        responses = tokens * config.rollout.max_response_tokens // config.rollout.max_row_tokens
        found["teachers"] = told * responses
    if chosen.replay.max_age:
        rows = config.trainer.prompts_per_step * config.rollout.samples_per_prompt
        kept = min(
            chosen.replay.max_rows or rows * chosen.replay.max_age, rows * chosen.replay.max_age
        )
        # as stored, and joined with the step's own rows for training
        several = 2 * kept + rows
        found["replay"] = row * tokens // rows * several
        if "teachers" in found:
            found["teachers"] += found["teachers"] // rows * several
    return found


def seconds(config: RunConfig, hosts: int, *, nic: float, token: float) -> dict[str, float]:
    """Returns the seconds that moving a step's rollouts between processes takes: "NIC" (network
    card) and "one core" (of a CPU).

    Hosts exchange their parts in a ring: with h hosts, 2 (h - 1) / h of all bytes go through the
    network card of each host. `hosts`: number of hosts; `nic`: bytes per second of a network card;
    `token`: seconds per token on the one process of each host that handles the rollouts.
    """
    passes = 1 + (config.algorithm.kl.coef > 0)  # of two numbers a token each
    moved = COMPLETIONS + NUMBER * (2 * passes + config.algorithm.advantage.needs_critic)
    ring = 2 * (hosts - 1) / hosts
    return {"NIC": ring * moved * tokens_of(config) / nic, "one core": token * tokens_of(config)}
