"""Seeds of sampled completions.

A seed depends on the run's seed, the task's number in the run, the sample's number among the task's
completions, and the turn. So step, batch size and schedule do not affect a completion.
"""

import hashlib


def sampling_seed(seed: int, task: int, sample: int) -> int:
    """Returns the sampling seed of a rollout's first turn, below 2^31. `seed`: of the run; `task`:
    number of the prompt in the run; `sample`: number of the rollout among the prompt's rollouts.
    """
    return _hashed(f"{seed}/{task}/{sample}")


def turn_seed(first: int, turn: int) -> int:
    """Returns the sampling seed, below 2^31, of turn number `turn` of a rollout; `first`: the seed
    of the rollout's turn 0.
    """
    return first if turn == 0 else _hashed(f"{first}/turn {turn}")


def continued_seed(first: int, tokens: int) -> int:
    """Returns the seed, below 2^31, for continuing a completion that was interrupted after `tokens`
    tokens; `first`: the seed that the completion started with.
    """
    return _hashed(f"{first}/token {tokens}") if tokens else first


def evaluation_seed(index: int, sample: int) -> int:
    """Returns the seed, below 2^31, of completion number `sample` of evaluation prompt `index`: the
    same in every evaluation and every run.
    """
    return _hashed(f"evaluation/{index}/{sample}")


def request_seed(source: str, number: int) -> int:
    """Returns the seed, below 2^31, of request `number` of the client named `source`."""
    return _hashed(f"{source}/{number}")


def _hashed(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest) % 2**31
