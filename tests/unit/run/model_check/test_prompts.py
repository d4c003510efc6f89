from types import SimpleNamespace
from typing import Any

from rftmega.run.model_check.reference import of_generation, of_prediction


def tokenizer(*ids: int) -> Any:
    """A tokenizer that makes these tokens of every text."""
    return SimpleNamespace(
        encode=lambda text, chat_template: ids, inner=SimpleNamespace(chat_template=None)
    )


def test_a_tokenizer_of_one_task_that_has_no_tokens_for_the_prompts_is_no_problem() -> None:
    found = [of_prediction(None, tokenizer()), of_prediction(None, tokenizer(7))]
    found.append(of_generation(None, tokenizer(), 8))
    assert [each.state for each in found] == ["skipped"] * 3
    assert "no tokens for 'What is 2+3?'" in found[-1].said
