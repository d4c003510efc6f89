"""Checks of algorithm options that contradict each other or have no effect."""

from rftmega.config.options.algorithms import (
    CPGD,
    AlgorithmConfig,
    Clip,
    NoImportance,
    PassAtK,
)
from rftmega.config.schema import RewardConfig, RunConfig
from rftmega.config.tree import unions, value_of

SWITCHED = (  # an option, and the one that must be above 0 for it to be read
    ("algorithm.kl.placement", "algorithm.kl.coef"),
    ("algorithm.kl.estimator", "algorithm.kl.coef"),
    ("algorithm.kl.target", "algorithm.kl.coef"),
    ("algorithm.kl.horizon", "algorithm.kl.target"),
    ("reward.shaping.overlong_penalty_factor", "reward.shaping.overlong_buffer_share"),
    ("algorithm.dynamic_sampling.metric", "algorithm.dynamic_sampling.max_rounds"),
    ("algorithm.dynamic_sampling.oversample", "algorithm.dynamic_sampling.max_rounds"),
    ("algorithm.replay.max_rows", "algorithm.replay.max_age"),
)


def algorithm_options(config: RunConfig) -> list[str]:
    """Returns the problems of algorithm options that have no effect or contradict each other."""
    algorithm = config.algorithm
    advantage, loss, kl = algorithm.advantage, algorithm.policy_loss, algorithm.kl
    found = []
    if kl.placement == "reward" and not advantage.takes_kl:
        found.append(
            f"algorithm.kl.placement=reward needs algorithm.advantage.type={' or '.join(_types('takes_kl'))}, not "
            f"{advantage.type}: nothing else reads it."
        )
    for option, switch in SWITCHED:
        value = value_of(config, option)
        already = any(reason.startswith(f"{option}=") for reason in found)
        if not already and value != value_of(RunConfig(), option) and not value_of(config, switch):
            found.append(f"{option}={value} needs {switch} above 0: nothing else reads it.")
    if isinstance(loss, CPGD) and not loss.drift_coef and loss.drift_clip != CPGD.drift_clip:
        found.append(
            f"algorithm.policy_loss.drift_clip={loss.drift_clip} needs algorithm.policy_loss.drift_coef above 0: nothing else "
            "reads it."
        )
    max_age = algorithm.replay.max_age
    if max_age and isinstance(algorithm.importance_sampling, NoImportance):
        found.append(
            f"algorithm.replay.max_age={max_age} needs algorithm.importance_sampling.type=token, sequence, mask or icepop: "
            "completions of earlier policies would count as if the present one had given them."
        )
    if max_age and advantage.needs_critic:
        found.append(
            f"algorithm.replay.max_age={max_age} with algorithm.advantage.type={advantage.type}: advantages of earlier steps are "
            "those of an earlier critic. Set it to 0."
        )
    if algorithm.reward_model_loss != "pairwise":
        found.append(
            f"algorithm.reward_model_loss={algorithm.reward_model_loss}: with algorithm.task={algorithm.task} nothing reads it. "
            "Leave it out."
        )
    if algorithm.preference != AlgorithmConfig().preference:
        found.append(
            f"algorithm.preference.type={algorithm.preference.type}: with algorithm.task={algorithm.task} nothing reads "
            "algorithm.preference. Leave it out, or set algorithm.task=preference."
        )
    if isinstance(loss, Clip) and 0 < loss.dual <= 1:
        found.append(f"algorithm.policy_loss.dual={loss.dual} must be above 1, or 0 for none.")
    if kl.coef and kl.estimator == "k1" and kl.placement == "loss":
        found.append(
            "algorithm.kl.estimator=k1 needs algorithm.kl.placement=reward: as a loss its gradient is zero on average."
        )
    if kl.coef and kl.estimator == "unbiased" and kl.placement == "reward":
        found.append(
            "algorithm.kl.estimator=unbiased needs algorithm.kl.placement=loss: in the reward, k1 is unbiased."
        )
    if advantage.needs_parts and config.reward.shaping != RewardConfig().shaping:
        found.append(
            f"reward.shaping with algorithm.advantage.type={advantage.type}: it changes the sum of the reward's components, and "
            "this estimator reads each by itself. Leave reward.shaping out."
        )
    return found


def _types(trait: str, *, has: bool = True) -> list[str]:
    """Returns the types of advantage estimators whose class attribute `trait` is `has`."""
    return [
        name
        for name, part in unions()["algorithm.advantage"].items()
        if getattr(part, trait) is has
    ]


def groups_of_one(config: RunConfig) -> list[str]:
    """Returns a problem if the advantage compares the completions of a group and groups have too
    few: the advantage of a single completion would be 0, and only weight decay would change weights.
    """
    advantage, given = (
        config.algorithm.advantage,
        ("rollout.samples_per_prompt", config.rollout.samples_per_prompt),
    )
    if config.rollout.train_samples_per_prompt:
        size = min(config.rollout.train_samples_per_prompt, config.rollout.samples_per_prompt)
        given = ("rollout.train_samples_per_prompt", size)
    if isinstance(advantage, PassAtK) and advantage.k > given[1] > 1:
        return [
            f"algorithm.advantage.k={advantage.k} needs as many completions of a prompt, and {given[0]}={given[1]}. Lower k, or "
            f"raise {given[0]}."
        ]
    if not advantage.compares_group or given[1] > 1:
        return []
    return [
        f"{given[0]}=1 with algorithm.advantage.type={advantage.type}: a completion is compared with the others of its prompt, "
        "and there are none, so nothing would be learnt. Take at least 2, or algorithm.advantage.type="
        f"{' or '.join(_types('compares_group', has=False))}."
    ]
