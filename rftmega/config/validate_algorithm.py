"""Options of the algorithm that refuse each other, or that nothing reads."""

from rftmega.config.schema import AlgorithmConfig, RunConfig


def algorithm_options(algorithm: AlgorithmConfig) -> list[str]:
    """Options that the others leave unread, and those that contradict each other."""
    found = []
    per_token = ("reinforce", "gae")
    needs = (  # an option and the choices that read it
        ("dual_clip", "surrogate", ("ppo",)),
        ("drift_coef", "surrogate", ("cpgd",)),
        ("clip_low", "surrogate", ("ppo", "gspo", "cispo", "cpgd")),
        ("clip_high", "surrogate", ("ppo", "gspo", "cispo", "cpgd")),
        ("gamma", "advantage", per_token),
        ("gae_lambda", "advantage", ("gae",)),
        ("value_clip", "advantage", ("gae",)),
        ("value_huber", "advantage", ("gae",)),
        ("freezing_actor_steps", "advantage", ("gae",)),
        ("scale_by_std", "advantage", ("group",)),
        ("clip_filter_weight", "advantage", ("group",)),
        ("kl_in", "advantage", ("leave_one_out", *per_token)),
    )
    for option, other, values in needs:
        if getattr(algorithm, option) != getattr(AlgorithmConfig, option) and getattr(algorithm, other) not in values:
            found.append(
                f"algorithm.{option}={getattr(algorithm, option)} needs algorithm.{other}={' or '.join(values)}, not "
                f"{getattr(algorithm, other)}: nothing else reads it."
            )
    switched = (
        ("kl_in", "kl_coef"),
        ("kl_estimator", "kl_coef"),
        ("kl_target", "kl_coef"),
        ("kl_horizon", "kl_target"),
        ("drift_clip", "drift_coef"),
        ("overlong_penalty", "overlong_share"),
        ("refill_by", "refill_rounds"),
        ("oversample", "refill_rounds"),
        ("replay_limit", "max_staleness"),
    )
    for option, switch in switched:
        already = any(reason.startswith(f"algorithm.{option}=") for reason in found)
        if not already and getattr(algorithm, option) != getattr(AlgorithmConfig, option) and not getattr(algorithm, switch):
            found.append(
                f"algorithm.{option}={getattr(algorithm, option)} needs algorithm.{switch} above 0: nothing else reads it."
            )
    if algorithm.max_staleness and algorithm.correction == "none":
        found.append(
            f"algorithm.max_staleness={algorithm.max_staleness} needs algorithm.correction=token, sequence or mask: answers of "
            "earlier policies would count as if the present one had given them."
        )
    if algorithm.max_staleness and algorithm.advantage == "gae":
        found.append(
            f"algorithm.max_staleness={algorithm.max_staleness} with algorithm.advantage=gae: advantages of earlier steps are "
            "those of an earlier critic. Set it to 0."
        )
    if 0 < algorithm.dual_clip <= 1:
        found.append(f"algorithm.dual_clip={algorithm.dual_clip} must be above 1, or 0 for none.")
    if algorithm.correction_cap < 1:
        found.append(f"algorithm.correction_cap={algorithm.correction_cap} must be at least 1.")
    elif algorithm.correction == "none" and algorithm.correction_cap != AlgorithmConfig.correction_cap:
        found.append(f"algorithm.correction_cap={algorithm.correction_cap} needs algorithm.correction: nothing else reads it.")
    for option in ("gae_lambda", "overlong_share", "high_entropy_share"):
        if getattr(algorithm, option) > 1:
            found.append(f"algorithm.{option}={getattr(algorithm, option)} must be at most 1.")
    if algorithm.kl_coef and algorithm.kl_estimator == "k1" and algorithm.kl_in == "loss":
        found.append("algorithm.kl_estimator=k1 needs algorithm.kl_in=reward: as a loss its gradient is zero on average.")
    if algorithm.surrogate in ("ppo", "gspo", "cpgd") and algorithm.clip_low >= 1:
        found.append(f"algorithm.clip_low={algorithm.clip_low} must be below 1 for algorithm.surrogate={algorithm.surrogate}.")
    return found


def groups_of_one(config: RunConfig) -> list[str]:
    """Groups in which an answer has no sibling to be better than: all advantages are 0, and only weight decay acts."""
    algorithm, given = config.algorithm, ("rollout.samples_per_prompt", config.rollout.samples_per_prompt)
    if algorithm.learnt_from:
        given = ("algorithm.learnt_from", min(algorithm.learnt_from, config.rollout.samples_per_prompt))
    if algorithm.advantage not in ("group", "leave_one_out") or given[1] > 1:
        return []
    return [
        f"{given[0]}=1 with algorithm.advantage={algorithm.advantage}: an answer is compared with the others to its prompt, and "
        "there are none, so nothing would be learnt. Take at least 2, or algorithm.advantage=reinforce or gae."
    ]
