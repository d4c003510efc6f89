"""Pickles a RunConfig as a dictionary of options, because classes from plugins exist only in
processes that have loaded the plugins.
"""

import copyreg
from dataclasses import asdict
from typing import Any

from rftmega.config.plugins import plugin_parts
from rftmega.config.schema import RunConfig
from rftmega.config.tree import built


def restored(tree: dict[str, Any]) -> RunConfig:
    """Returns the RunConfig with the values of `tree`, nested dictionaries as returned by `asdict`.

    Loads the plugins' files again.
    """
    run: RunConfig = built(RunConfig, tree, plugin_parts(tree["plugins"]))
    return run


def reduced(config: RunConfig) -> tuple[Any, tuple[dict[str, Any]]]:
    return restored, (asdict(config),)


copyreg.pickle(RunConfig, reduced)
