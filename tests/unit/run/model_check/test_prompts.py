from types import SimpleNamespace
from typing import Any

import torch

from rftmega.run.model_check.reference import of_generation, of_prediction


def tokenizer(*ids: int) -> Any:
    """A tokenizer that makes these tokens of every text."""
    return SimpleNamespace(
        encode=lambda text, chat_template: ids, inner=SimpleNamespace(chat_template=None)
    )


def test_a_tokenizer_of_one_task_that_has_no_tokens_for_the_prompts_is_no_problem() -> None:
    found = [of_prediction(None, tokenizer()), of_prediction(None, tokenizer(7))]
    found.append(of_generation(None, tokenizer(), 8, positions=64))
    assert [each.state for each in found] == ["skipped"] * 3
    assert "no tokens for 'What is 2+3?'" in found[-1].said


def test_a_completion_stays_within_the_positions_of_the_model() -> None:
    asked = []

    def generate(given: torch.Tensor, *, max_new_tokens: int, **_: Any) -> torch.Tensor:
        asked.append(max_new_tokens)
        return torch.cat([given, torch.tensor([[5]])], -1)

    model, three = SimpleNamespace(generate=generate), tokenizer(1, 2, 3)
    three.stop_ids, three.decode = [5], str
    assert of_generation(model, three, 64, positions=10).state == "ok"
    assert asked == [7]
    full = of_generation(model, three, 64, positions=3)
    assert full.state == "skipped"
    assert "3 positions leave no room" in full.said
