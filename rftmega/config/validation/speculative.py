"""Checks of speculative decoding in rollouts."""

from pathlib import Path

from rftmega.config.capabilities import engine_of
from rftmega.config.options.speculative import DraftModel
from rftmega.config.schema import RunConfig


def speculative(config: RunConfig) -> list[str]:
    """Returns the conflicts of rollout.speculative with other options."""
    rollout = config.rollout
    if not rollout.speculative.draft_tokens:
        return []
    given = f"rollout.speculative.type={rollout.speculative.type}"
    found = []
    if not engine_of(rollout).speculates:
        found.append(f"{given} needs rollout.engine=vllm, not {rollout.engine}. Set it to none.")
    if config.strategy == "separate" and rollout.transport == "checkpoint":
        found.append(
            f"{given} needs servers with this package: rollout.transport=checkpoint is for others. Set it to none."
        )
    if rollout.router_replay == "engine":
        found.append(
            f"{given}: rollout.router_replay=engine would record the experts of rejected tokens, too. Set router_replay to "
            "trainer, or this to none."
        )
    if config.trainer.eval_min_p:
        found.append(
            f"{given}: vLLM has no min_p with it (trainer.eval_min_p={config.trainer.eval_min_p:g}). Set eval_min_p to 0, or "
            "this to none."
        )
    if isinstance(rollout.speculative, DraftModel):
        found += _folder(rollout.speculative.path)
    return found


def _folder(path: str) -> list[str]:
    """Returns the reasons why `path` can't be the folder of a draft model."""
    if not path:
        return [
            "rollout.speculative.type=draft_model needs rollout.speculative.path, a model folder."
        ]
    if not (Path(path) / "config.json").is_file():
        return [f"rollout.speculative.path={path} is no model folder: it has no config.json."]
    return []
