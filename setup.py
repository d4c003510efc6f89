"""Package `rftmega`. Its folders converters, model_providers, tools, examples and requirements are links
to those beside it, so that nothing but `rftmega` is installed.
"""

from pathlib import Path

from setuptools import find_packages, setup

# what config, planning, names and the page need; a run needs requirements/ as README.md says
LIGHT = (
    "PyYAML",
    "numpy",
    "omegaconf",
    "pydantic",
    "safetensors",
    "tqdm",
    "transformers",
    "xxhash",
)


def pins(name: str) -> list[str]:
    lines = (
        Path(__file__).with_name("requirements").joinpath(f"{name}.txt").read_text().splitlines()
    )
    # "-": where pip looks, not what it installs
    return [line for line in lines if line and not line.startswith(("#", "-"))]


def light() -> list[str]:
    """Returns the pins of what is always needed; torch of any build."""
    found = [pin for pin in pins("cpu") if pin.partition("==")[0] in LIGHT]
    (torch,) = {pin.partition(";")[0].partition("+")[0] for pin in pins("torch")}
    return [torch, *found]


def version() -> str:
    """Returns what `rftmega.__version__` says, without importing the package."""
    text = Path(__file__).with_name("rftmega").joinpath("__init__.py").read_text()
    return text.partition('__version__ = "')[2].partition('"')[0]


setup(
    name="rftmega",
    version=version(),
    description="Reinforcement fine-tuning of language models on Megatron-Core with vLLM rollouts",
    long_description=Path(__file__).with_name("README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["rftmega*"]),
    package_data={
        "rftmega": ["requirements/*.txt", "requirements/torchvision_cpu/*.*"],
        "rftmega.config": ["recipes/*.yaml", "from_other_systems.md"],
        "rftmega.tools": ["*.html", "*.sbatch"],
        "rftmega.examples": ["*/*.yaml", "*/*.jinja", "*/recipes/*.yaml", "planning/*/*"],
    },
    install_requires=light(),
    entry_points={
        "console_scripts": ["rftmega = rftmega.__main__:main"],
        "vllm.general_plugins": ["rftmega = rftmega.rollout.engines.plugin:register"],
    },
    extras_require={name: pins(name) for name in ("dev", "docs", "wandb", "mlflow", "trackio")},
)
