"""Former names of options, which are rejected with a message that states the current name."""

RENAMED = {
    "algorithm.scale_by_std": "algorithm.advantage.scale_by_std",
    "algorithm.clip_filter_weight": "algorithm.advantage.clip_filter_weight",
    "algorithm.gamma": "algorithm.advantage.gamma",
    "algorithm.gae_lambda": "algorithm.advantage.lam",
    "algorithm.surrogate": "algorithm.policy_loss.type",
    "algorithm.clip_low": "algorithm.policy_loss.low",
    "algorithm.clip_high": "algorithm.policy_loss.high",
    "algorithm.dual_clip": "algorithm.policy_loss.dual",
    "algorithm.drift_coef": "algorithm.policy_loss.drift_coef",
    "algorithm.drift_clip": "algorithm.policy_loss.drift_clip",
    "algorithm.correction": "algorithm.importance_sampling.type",
    "algorithm.correction_cap": "algorithm.importance_sampling.cap",
    "algorithm.weighting": "algorithm.loss_aggregation",
    "algorithm.kl_in": "algorithm.kl.placement",
    "algorithm.kl_coef": "algorithm.kl.coef",
    "algorithm.kl_target": "algorithm.kl.target",
    "algorithm.kl_horizon": "algorithm.kl.horizon",
    "algorithm.kl_estimator": "algorithm.kl.estimator",
    "algorithm.max_staleness": "algorithm.replay.max_age",
    "algorithm.replay_limit": "algorithm.replay.max_rows",
    "algorithm.refill_rounds": "algorithm.dynamic_sampling.max_rounds",
    "algorithm.refill_by": "algorithm.dynamic_sampling.metric",
    "algorithm.oversample": "algorithm.dynamic_sampling.oversample",
    "algorithm.learnt_from": "rollout.train_samples_per_prompt",
    "algorithm.mini_batches": "algorithm.updates_per_epoch",
    "algorithm.freezing_actor_steps": "critic.warmup_steps",
    "algorithm.value_clip": "critic.value_clip",
    "algorithm.value_huber": "critic.value_huber",
    "algorithm.reward_clip": "reward.shaping.clip",
    "algorithm.reward_normalise": "reward.shaping.normalise",
    "algorithm.overlong_share": "reward.shaping.overlong_buffer_share",
    "data.learnt_turns": "data.trained_turns",
    "data.picture_hosts": "data.media_hosts",
    "data.pictures_folder": "data.media_folder",
    "rollout.max_pictures": "rollout.max_images",
    "rollout.roster": "rollout.server_list",
    "algorithm.overlong_penalty": "reward.shaping.overlong_penalty_factor",
}
REMOVED = {
    "trainer.attention_weight": "Work is balanced over processes by the model's floating-point operations.",
    "trainer.patch_weight": "Work is balanced over processes by the model's floating-point operations.",
}
"""Former options without a replacement, and why there is none."""

TRUNCATING = ("top_p", "top_k", "min_p")
"""Options of other systems under `rollout.` that restrict sampling to a part of the vocabulary."""

RENAMED_TYPES = {  # (option, former value) -> value
    ("algorithm.advantage.type", "group"): "group_norm",
    ("algorithm.policy_loss.type", "ppo"): "clip",
}


def renamed(name: str, value: object) -> str:
    """Returns the error message for a former option name, with its replacement if any, or for
    rollout.top_p, top_k and min_p, which only evaluation has. `value`: the option's given value,
    for the message.

    Returns "" for any other name.
    """
    section, _, last = name.rpartition(".")
    if section == "rollout" and last in TRUNCATING:
        return (
            f"{name}={value}: completions to learn from are sampled from the whole vocabulary, since the trainer's "
            f"log-probabilities, ratios and KL are of it. trainer.eval_{last} is for evaluation, with trainer.eval_temperature."
        )
    if why := REMOVED.get(name):
        return f"{name} was removed. {why} Remove it."
    now = RENAMED.get(name)
    if now is None:
        return ""
    known = RENAMED_TYPES.get((now, str(value)))
    return f"{name} is now {now}." + (f" Write {now}={known} for {value}." if known else "")
