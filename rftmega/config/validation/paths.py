"""Checks of options that are paths: an empty path would mean the working directory or the root."""

from rftmega.config.options.speculative import DraftModel
from rftmega.config.schema import RunConfig
from rftmega.config.tree import value_of

PATHS = {  # option -> whether an empty path means none
    "model.path": False,
    "model.lora.path": True,
    "critic.path": True,
    "reward.model_path": True,
    "reward.cost_path": True,
    "reward.judge_cache": True,
    "rollout.order": True,
    "rollout.server_list": True,
    "rollout.weights_folder": True,
    "rollout.tls_ca": True,
    "data.train": True,
    "data.eval": True,
    "data.ptx": True,
    "data.media_folder": True,
    "data.chat_template_file": True,
    "trainer.output": False,
    "checkpoint.folder": True,
    "checkpoint.resume": False,
}


def given_paths(config: RunConfig) -> list[tuple[str, str, bool]]:
    """Returns (option, path, whether an empty path means that no path is given) for every option
    that is a path.
    """
    given = [(name, value_of(config, name), may_be_empty) for name, may_be_empty in PATHS.items()]
    drafts = config.rollout.speculative
    if isinstance(drafts, DraftModel):
        given.append(("rollout.speculative.path", drafts.path, True))
    given += [("data.sources: a source", source, False) for source in config.data.sources]
    given += [(f"data.evals.{name}", source, False) for name, source in config.data.evals.items()]
    given += [
        (f"model.lora.evaluated.{name}", path, True)
        for name, path in config.model.lora.evaluated.items()
    ]
    return given


def has_nul(config: RunConfig) -> bool:
    """Returns whether a path contains a NUL character, which file system calls reject."""
    return any("\0" in value for _, value, _ in given_paths(config))


def paths(config: RunConfig) -> list[str]:
    """Returns a problem for each path that is empty or contains a NUL character."""
    found = []
    for name, value, may_be_empty in given_paths(config):
        if not value.strip() and not (may_be_empty and not value):
            found.append(
                f"{name}={value} is empty. Give a path"
                + (", or leave it out." if name in PATHS else ".")
            )
        elif "\0" in value:
            found.append(f"{name}={value!r} is no path: it has a NUL.")
    return found
