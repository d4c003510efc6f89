"""Options that are nobody's business: a config that is stored, published or complained about goes
without it.
"""

from dataclasses import asdict
from typing import Any

from rftmega.config.schema import RunConfig

SECRET = ("reward.remote_url",)  # options that may carry a password


def without_secrets(config: RunConfig) -> dict[str, Any]:
    """Returns the options as nested dictionaries, but for those."""
    tree = asdict(config)
    for name in SECRET:
        section, _, leaf = name.rpartition(".")
        del tree[section][leaf]
    return tree


def shown(name: str, value: Any) -> str:
    """Returns "name=value", as errors say it; of a secret the name alone."""
    return name if name in SECRET else f"{name}={value}"
