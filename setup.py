"""Packages `rftmega`, `model_providers` and `converters`; everything that is pinned lives in
`requirements/`.
"""

from pathlib import Path

from setuptools import find_packages, setup


def pins(name: str) -> list[str]:
    lines = (
        Path(__file__).with_name("requirements").joinpath(f"{name}.txt").read_text().splitlines()
    )
    # "-": where pip looks, not what it installs
    return [line for line in lines if line and not line.startswith(("#", "-"))]


setup(
    name="rftmega",
    version="0.1.0",
    description="Reinforcement fine-tuning of language models on Megatron-Core with vLLM rollouts",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["rftmega*", "model_providers*", "converters*"]),
    package_data={"rftmega.config": ["recipes/*.yaml"]},
    entry_points={"vllm.general_plugins": ["rftmega = rftmega.rollout.plugin:register"]},
    extras_require={
        "cpu": pins("torch") + pins("cpu"),
        "cuda": pins("cuda"),
        "dev": pins("dev"),
        "wandb": pins("wandb"),
    },
)
