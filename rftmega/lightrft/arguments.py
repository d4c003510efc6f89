"""Translation of a run's options to LightRFT's names."""

from types import SimpleNamespace

from rftmega.config import AlgorithmConfig, RunConfig
from rftmega.config.options.algorithms import GroupNorm

ESTIMATORS = {"leave_one_out": "rloo"}  # other estimators have the same name in both


def lightrft_arguments(config: RunConfig) -> SimpleNamespace:
    """Returns a run's options under LightRFT's names: the options that `StrategyBase.args` and
    NaiveExperienceMaker read, and others that LightRFT has.
    """
    algorithm, optimizer, rollout = config.algorithm, config.optimizer, config.rollout
    return SimpleNamespace(
        pretrain=config.model.path,
        seed=config.trainer.seed,
        max_norm=optimizer.clip_grad,
        actor_learning_rate=optimizer.learning_rate,
        n_samples_per_prompt=rollout.samples_per_prompt,
        rollout_batch_size=config.trainer.prompts_per_step,
        prompt_max_len=rollout.max_prompt_tokens,
        generate_max_len=rollout.max_response_tokens,
        temperature=rollout.temperature,
        engine_type=rollout.engine,
        engine_tp_size=rollout.tensor,
        enable_engine_sleep=config.strategy == "colocated",
        advantage_estimator=_estimator(algorithm),
        gamma=getattr(algorithm.advantage, "gamma", 1.0),
        lambd=getattr(algorithm.advantage, "lam", 1.0),
        kl_estimator=algorithm.kl.estimator,
        init_kl_coef=algorithm.kl.coef,
        use_kl_loss=algorithm.kl.placement == "loss",
    )


def _estimator(algorithm: AlgorithmConfig) -> str:
    chosen = algorithm.advantage
    if isinstance(chosen, GroupNorm) and not chosen.scale_by_std:
        return "reinforce_baseline"
    return ESTIMATORS.get(chosen.type, chosen.type)


def rows_per_update(config: RunConfig) -> int:
    """Returns the number of completions that one optimizer step trains on."""
    completions = config.rollout.train_samples_per_prompt or config.rollout.samples_per_prompt
    return config.trainer.prompts_per_step * completions // config.algorithm.updates_per_epoch


def rows_per_micro_batch(config: RunConfig) -> int:
    """Returns how many completions of maximum length fit in a micro-batch, whose size rftmega
    limits by tokens.
    """
    longest = config.rollout.max_row_tokens
    return max(1, config.trainer.max_tokens_per_micro_batch // longest)
