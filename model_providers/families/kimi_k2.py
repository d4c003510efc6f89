"""Kimi-K2: DeepSeek-V3's architecture with a separate model_type, which transformers does not know."""

from rftmega.model_providers.families import deepseek_v3

describe = deepseek_v3.describe
