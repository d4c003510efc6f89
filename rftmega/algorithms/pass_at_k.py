"""pass@k: the chance that at least one of k completions is correct."""

from math import comb


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Returns the probability that k of the `samples` completions of a prompt, drawn without
    replacement, include one of the `right` (correct) ones.

    This is the unbiased estimate of pass@k (arXiv:2107.03374, eq. 1): 1 - C(samples - right, k) /
    C(samples, k), computed in integers up to the division. Raises ValueError unless 1 <= k <=
    samples and 0 <= right <= samples.
    """
    if not (1 <= k <= samples and 0 <= right <= samples):
        raise ValueError(
            f"pass@{k} of {samples} answers, {right} of them right: k and right must be within the answers, k >= 1."
        )
    return 1 - comb(samples - right, k) / comb(samples, k)
