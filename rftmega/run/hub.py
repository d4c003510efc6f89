"""Downloads the models and data sets of the Hugging Face hub that a config names.

The package huggingface_hub downloads, so its environment variables apply: HF_HOME (cache), HF_TOKEN,
HF_ENDPOINT (address) and HF_HUB_OFFLINE.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

from rftmega.config import DataConfig, RunConfig
from rftmega.core.errors import ConfigError

# org/name, or org/name@revision
REPOSITORY = re.compile(r"([\w-][\w.-]*/[\w.-]+)(?:@([\w./-]+))?")
TEXT = ("*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken", "*.py")
WEIGHTS = ("*.safetensors",)
DATA = ("*.parquet", "*.jsonl", "*.jsonl.gz", "*.json", "*.csv", "*.arrow")


def fetched(config: RunConfig, *, weights: bool = True) -> RunConfig:
    """Returns the config with hub repositories replaced by folders of the local cache. Without
    `weights`, only the config and tokenizer files of models are downloaded, and no data.

    An existing local path is never looked up on the hub. Raises ConfigError for a repository that
    can't be downloaded.
    """
    patterns = (*TEXT, *WEIGHTS) if weights else TEXT

    def model(option: str, path: str) -> str:
        return _local(option, path, "model", patterns)

    teachers = [
        replace(each, path=model("algorithm.teachers[].path", each.path)) if each.loads else each
        for each in config.algorithm.teachers
    ]
    reward_model = model("reward.model_path", config.reward.model_path)
    cost_model = model("reward.cost_path", config.reward.cost_path)
    return replace(
        config,
        model=replace(config.model, path=model("model.path", config.model.path)),
        algorithm=replace(config.algorithm, teachers=teachers),
        critic=replace(config.critic, path=model("critic.path", config.critic.path)),
        reward=replace(config.reward, model_path=reward_model, cost_path=cost_model),
        data=_data(config.data) if weights else config.data,
    )


def _data(config: DataConfig) -> DataConfig:
    def local(option: str, source: str) -> str:
        path, sign, split = source.partition("#")
        return f"{_local(option, path, 'dataset', DATA)}{sign}{split}"

    return replace(
        config,
        train=local("data.train", config.train),
        eval=local("data.eval", config.eval),
        ptx=local("data.ptx", config.ptx),
        sources={local("data.sources", path): share for path, share in config.sources.items()},
        evals={name: local(f"data.evals.{name}", path) for name, path in config.evals.items()},
    )


def _local(option: str, path: str, kind: str, patterns: Sequence[str]) -> str:
    named = REPOSITORY.fullmatch(path)
    is_file = any(fnmatch(path, pattern) for pattern in DATA)  # a data file that is missing
    if named is None or is_file or Path(path).exists() or Path(path).parent.is_dir():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    repository, revision = named.groups()
    said = f"{option}={path}"
    try:
        found = snapshot_download(
            repository, repo_type=kind, revision=revision, allow_patterns=list(patterns)
        )
    except GatedRepoError as error:
        raise ConfigError(
            f"{said}: its owner wants to know who takes it. Agree on the hub's page of it, and set HF_TOKEN to a token of yours."
        ) from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"{said}: the hub's {repository} has no revision {revision}.") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"{said} is no folder here, and no {kind} of the hub that this account sees (HF_TOKEN). Is it written right?"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"{said} is no folder here, not in the hub's cache, and the hub can't be reached. Where there is a network, run\n"
            f"    hf download {repository} --repo-type {kind}{f' --revision {revision}' if revision else ''}\n"
            "and bring the cache (HF_HOME) here, or give a folder."
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ConfigError(f"{said} can't be fetched from the hub: {error}") from error
    return found
