"""Groups of metrics for dashboards: rollout/reward, train/loss, eval/math, perf/seconds_rollout."""

import re
from collections.abc import Mapping

from rftmega.core.types import Metrics

# group -> pattern of the names that its metrics have in metrics.jsonl
GROUPS: Mapping[str, re.Pattern[str]] = {
    "eval": re.compile(r"eval_.+"),
    "perf": re.compile(
        r"(push|servers?|seconds|work|memory|tokens_per_second|tflops|mfu|pipeline|data_parallel)_.+|padding|shared_tokens"
    ),
    "rollout": re.compile(
        r"reward(_.+)?|spread|varied|response_length|generated_tokens|truncated|routes_known|refills|mixed_answers|staleness(_.+)?"
        r"|(data(?!_parallel)|environment|groups|logprob_gap|replay|rollouts?|speculative)_.+|token_mult_prob_error"
    ),
    "train": re.compile(
        r"loss|policy_loss|ratio|ppo_kl|importance(_effective)?|kl|entropy|clip_fraction|(optimizer|skipped|empty)_steps"
        r"|value(_.+)?|explained_variance|cross_entropy|log_odds_ratio|accuracy|margin|(chosen|rejected|safety|ptx)_.+|count|grad_norm"
        r"|learning_rate|reference_kl|kl_coef"
    ),
}
OTHERS = "train"  # the group of a metric that no pattern has, such as one of your own loss


def group_of(name: str) -> str:
    """Returns the group of the metric `name`. The critic's metrics (critic_<name>) are in the group
    of the policy's; a metric that no group knows is in OTHERS.
    """
    plain = name.removeprefix("critic_")
    return next((group for group, names in GROUPS.items() if names.fullmatch(plain)), OTHERS)


def grouped_metrics(metrics: Metrics) -> Metrics:
    """Returns metrics with their names in a dashboard: the group, a slash and the name. Those of an
    evaluation lose the prefix "eval_", which the group says.
    """
    found = {}
    for name, value in metrics.items():
        group = group_of(name)
        found[f"{group}/{name.removeprefix('eval_') if group == 'eval' else name}"] = value
    return found
