"""Checks of metric loggers and of the range of steps to record."""

from importlib.metadata import PackageNotFoundError, version

from rftmega.config.schema import LoggingConfig, RunConfig

PORTS = 65535
# option -> packages, of which one is enough
PACKAGES = {"wandb": ("wandb",), "mlflow": ("mlflow-skinny", "mlflow"), "trackio": ("trackio",)}
NO_PROJECT = "/\\#?%:"  # characters that wandb rejects in project names
LONGEST_PROJECT = 128


def logging_options(config: RunConfig) -> list[str]:
    """Returns the problems of logging options: invalid ranges of steps and ports, missing packages,
    and options without effect.
    """
    logging, found = config.logging, []
    if logging.timeline:
        first, last = logging.timeline if len(logging.timeline) == 2 else (0, 0)
        if not 1 <= first <= last <= config.trainer.steps:
            found.append(
                f"logging.timeline={logging.timeline} must be a first and a last step, from 1 to "
                f"trainer.steps={config.trainer.steps}, as [3,4]."
            )
    if not 0 <= logging.prometheus_port <= PORTS:
        found.append(
            f"logging.prometheus_port={logging.prometheus_port} must be a port, at most {PORTS}, or 0 for none."
        )
    if not logging.prometheus_port and logging.prometheus_host != LoggingConfig.prometheus_host:
        found.append(
            f"logging.prometheus_host={logging.prometheus_host} needs logging.prometheus_port: nothing else reads it."
        )
    for name, packages in PACKAGES.items():
        chosen = getattr(logging, name)
        if chosen and not any(_installed(package) for package in packages):
            found.append(
                f"logging.{name}={chosen} needs a package that is not here. Install it: pip install 'rftmega[{name}]'."
            )
    odd = [letter for letter in NO_PROJECT if letter in logging.wandb]
    if odd or len(logging.wandb) > LONGEST_PROJECT:
        found.append(
            f"logging.wandb={logging.wandb!r} is no name of a project: at most {LONGEST_PROJECT} characters, and none of "
            f"{' '.join(NO_PROJECT)}. Whose project it is says WANDB_ENTITY."
        )
    return found


def _installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True
