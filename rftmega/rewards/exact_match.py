"""The answer is the label."""


def exact_match(response: str, label: str) -> float:
    """1 where the response is the label, surrounding white space aside."""
    return float(response.strip() == label.strip())
