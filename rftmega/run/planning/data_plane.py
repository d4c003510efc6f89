"""Foretells what a host holds of a step's rollouts, whichever process made them, and how long their
way takes from the engines to the micro-batches.
"""

from rftmega.config import RunConfig
from rftmega.core.expert_routes import kind_of
from rftmega.model_providers.description import Experts

COMPLETIONS = 4 + 1 + 4 + 4  # bytes of a token: id, mask, log-prob, version of the policy
NUMBER = 4  # bytes of a log-prob, an entropy, a value, an advantage
# bytes of a token that the gap between engine and trainer takes while it is found out: numbers in
# float64, their copy in order, and what they were made of
AT_WORK = 4 * 8


def tokens_of(config: RunConfig) -> int:
    """Returns the tokens of a step's rollouts, if all are as long as they may be."""
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    return config.trainer.prompts_per_step * config.rollout.samples_per_prompt * longest


def scored(config: RunConfig) -> int:
    """Returns the numbers of a token that models give: log-prob and entropy of the policy, log-prob
    of the reference, value of the critic.
    """
    chosen = config.algorithm
    return 2 + (chosen.kl.coef > 0) + chosen.advantage.needs_critic


def of_routes(config: RunConfig, experts: Experts | None) -> int:
    """Returns the bytes of a token that say which experts it is sent to."""
    if experts is None or config.rollout.router_replay == "none":
        return 0
    return len(experts.layers) * experts.active * kind_of(experts.number).itemsize


def on_each_host(config: RunConfig, experts: Experts | None = None) -> dict[str, int]:
    """Returns the bytes that all processes of a host have in common, by kind. `experts`: of the
    policy, where it is a mixture.
    """
    chosen, tokens = config.algorithm, tokens_of(config)
    if chosen.task != "rl":
        return {}
    trained = 1 + chosen.advantage.needs_critic  # advantages, returns
    row = COMPLETIONS + NUMBER * (scored(config) + trained) + chosen.drop_truncated
    row += of_routes(config, experts)
    found = {"rollout": row * tokens, "at_work": AT_WORK * tokens}
    if chosen.replay.max_age:
        rows = config.trainer.prompts_per_step * config.rollout.samples_per_prompt
        kept = min(
            chosen.replay.max_rows or rows * chosen.replay.max_age, rows * chosen.replay.max_age
        )
        # as kept, and joined with the step's own to be learnt from
        found["replay"] = row * tokens // rows * (2 * kept + rows)
    return found


def seconds(config: RunConfig, hosts: int, *, nic: float, token: float) -> dict[str, float]:
    """Returns what takes time -> seconds of a step.

    Hosts exchange what each has in a ring: 2 (h - 1) / h of all bytes go through a host's `nic`
    (bytes a second). One process of a host computes; `token`: its seconds for one.
    """
    passes = 1 + (config.algorithm.kl.coef > 0)  # of two numbers a token each
    moved = COMPLETIONS + NUMBER * (2 * passes + config.algorithm.advantage.needs_critic)
    ring = 2 * (hosts - 1) / hosts
    return {"NIC": ring * moved * tokens_of(config) / nic, "one core": token * tokens_of(config)}
