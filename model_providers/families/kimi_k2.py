"""Kimi-K2: DeepSeek-V3's architecture under its own model_type, which transformers does not
know.
"""

from rftmega.model_providers.families import deepseek_v3

describe = deepseek_v3.describe
