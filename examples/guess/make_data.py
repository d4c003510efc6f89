"""Writes train.jsonl, eval.jsonl and warm_start.jsonl: pairs of smallest and secret number, and
games with random guesses among the remaining numbers.

No pair is reserved for evaluation: the model never sees the secret number, and would learn which
ones never occur.
"""

import argparse
import json
import random
from pathlib import Path

NUMBERS, FIRST, TURNS = 7, 25, 3  # the first number is below FIRST
GAMES = 3000


def write(folder: Path, *, seed: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    pairs = [(first, first + place) for first in range(FIRST) for place in range(NUMBERS)]
    drawn = random.Random(seed)
    drawn.shuffle(pairs)
    played = [{"prompt": str(first), "label": str(secret)} for first, secret in pairs]
    files = {"eval": played, "train": played}
    files["warm_start"] = [
        {"prompt": str(first), "label": " ".join(game(first, secret, drawn))}
        for first, secret in drawn.choices(pairs, k=GAMES)
    ]
    for name, records in files.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")


def game(first: int, secret: int, drawn: random.Random) -> list[str]:
    """Returns the words of one game: guesses, and the replies to them."""
    low, high, words = first, first + NUMBERS - 1, list[str]()
    for _ in range(TURNS):
        guess = drawn.randint(low, high)
        words.append(str(guess))
        if guess == secret:
            break
        words.append("<" if secret < guess else ">")
        low, high = (low, guess - 1) if secret < guess else (guess + 1, high)
    return words


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/guess/data"))
    write(parser.parse_args().folder)
