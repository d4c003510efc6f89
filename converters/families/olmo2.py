"""OLMo 2: norms follow attention and MLP, and the norms of q and k span all heads."""

from rftmega.converters.config_fields import Fields
from rftmega.converters.decoder import Config, decoder, dense_mlp, grouped_attention
from rftmega.converters.rules import Rule

FIELDS = Fields(
    defaults={"num_key_value_heads": None, "attention_bias": False, "pad_token_id": 1},
    nullable=("num_key_value_heads", "pad_token_id"),
    not_null=("head_dim",),
)


def table(config: Config) -> list[Rule]:
    attention = grouped_attention(config, full_width_qk_norm=True)
    return decoder(config, attention, dense_mlp(config), post_norm=True)
