"""Checks a config for all problems before a run; of a model's folder the checks read only JSON
files and file names.

Each section's rules are in a separate file. Importing this package is fast: it does not import
torch.
"""

from rftmega.config.schema import RunConfig
from rftmega.config.secrets import without_credentials
from rftmega.config.validation.adapters import adapters
from rftmega.config.validation.algorithm import algorithm_options, groups_of_one
from rftmega.config.validation.asynchronous import asynchronous
from rftmega.config.validation.backend import backend
from rftmega.config.validation.checkpoint import checkpoints
from rftmega.config.validation.data import files, training_data
from rftmega.config.validation.environment import environment
from rftmega.config.validation.faults import faults
from rftmega.config.validation.layout import critic, engine, layout, overlap
from rftmega.config.validation.logging import logging_options
from rftmega.config.validation.optimizer import optimizer
from rftmega.config.validation.paths import has_nul, paths
from rftmega.config.validation.quantization import quantization
from rftmega.config.validation.ranges import choices_and_ranges
from rftmega.config.validation.reward import reward_parts
from rftmega.config.validation.router_replay import router_replay
from rftmega.config.validation.server_group import server_group
from rftmega.config.validation.speculative import speculative
from rftmega.config.validation.teachers import teachers
from rftmega.config.validation.trained_order import trained_order
from rftmega.config.validation.trainer import evaluation, exports, held_out_prompts, step_rows
from rftmega.config.validation.vision import vision
from rftmega.config.validation.without_rollouts import unread_without_rollouts


def violations(config: RunConfig, world_size: int, *, data: bool = True) -> list[str]:
    """Returns all reasons why `config` cannot run on `world_size` processes, each with a suggested
    change; an empty list if there are none.

    `data=False` skips the checks of data and of weight files.
    """
    if has_nul(config):  # other checks would access the file system
        return [without_credentials(reason) for reason in paths(config)]
    unknown, numbers = choices_and_ranges(config)
    if world_size < 1:
        numbers.append(f"--processes {world_size} must be at least 1.")
    if not numbers:  # the arithmetic below needs valid sizes
        numbers = (
            backend(config, world_size)
            + layout(config.parallel, world_size)
            + overlap(config.optimizer)
            + optimizer(config)
            + step_rows(config)
            + held_out_prompts(config)
        )
        if config.algorithm.task == "rl":
            numbers += (
                engine(config, world_size)
                + algorithm_options(config)
                + groups_of_one(config)
                + teachers(config, world_size)
                + reward_parts(config)
                + evaluation(config)
                + environment(config)
                + asynchronous(config)
                + server_group(config)
                + router_replay(config)
                + quantization(config)
                + speculative(config)
            )
        elif not unknown:
            numbers += unread_without_rollouts(config)
        numbers += critic(config, world_size) + logging_options(config)
        numbers += checkpoints(config) + faults(config) + vision(config) + exports(config)
        numbers += adapters(config)
    found = unknown + numbers + paths(config)
    if data:
        found += training_data(config) + files(config) + trained_order(config)
    return [without_credentials(reason) for reason in found]
