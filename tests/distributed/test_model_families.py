"""Models of other architectures through a training run on FSDP2: rows of the table that
`python -m tests.families` makes.
"""

import pytest

from tests.families import STAGES, causal_types, row_of, verdict

# a router's correction bias; a soft cap; tensors of three sizes in one; a state instead of a cache;
# layers without positions; an inner decoder
UNLIKE = ("deepseek_v3", "gemma2", "olmo_hybrid", "mamba2", "opt", "llama4_text")


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(each, marks=[] if each in UNLIKE else [pytest.mark.ranks])
        for each in causal_types()
    ],
)
def test_a_model_trains_as_transformers_does_or_is_refused_before_it_is_built(
    model_type: str,
) -> None:
    row = row_of(model_type)
    assert verdict(row) in ("ok", "refused", "not built"), row
    if model_type in UNLIKE:
        assert verdict(row) == "ok", row
        assert set(STAGES) <= row.keys()
