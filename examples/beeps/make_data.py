"""Writes recordings of beeps, and train.jsonl, eval.jsonl, warm_start.jsonl: how many beeps are
there? In swapped.jsonl the questions of eval.jsonl are paired with each other's recordings.

A recording is a WAV of 0.5 to 1 s at 16 kHz with 1 to 4 beeps of one pitch, in a little noise. Each
number is equally frequent. No recording is in more than one line.
"""

import argparse
import json
import wave
from pathlib import Path

import numpy as np

RATE = 16000
MOST = 4  # beeps
PITCHES = (400, 800, 1600)  # Hz
BEEP, PAUSE = 0.06, 0.06  # seconds; a pause is at least as long
SIZES = {"eval": 100, "warm_start": 400, "train": 800}
Line = dict[str, str | list[str]]


def write(folder: Path, *, seed: int = 0, sizes: dict[str, int] = SIZES) -> None:
    drawn = np.random.default_rng(seed)
    for name, size in sizes.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        lines: list[Line] = []
        for number in range(size):
            beeps = 1 + number % MOST
            path = f"{name}/{number:04}.wav"
            save_wav(folder / path, recording(beeps, drawn))
            lines.append({"prompt": "<audio>beeps?", "label": str(beeps), "audio": [path]})
        drawn.shuffle(lines)  # type: ignore[arg-type]
        save(folder / f"{name}.jsonl", lines)
        if name == "eval":
            save(folder / "swapped.jsonl", swapped(lines))


def save(file: Path, lines: list[Line]) -> None:
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")


def swapped(lines: list[Line]) -> list[Line]:
    """Returns each question with the next one's recording: listening gives only chance accuracy."""
    following = lines[1:] + lines[:1]
    pairs = zip(lines, following, strict=True)
    return [{**line, "audio": after["audio"]} for line, after in pairs]


def recording(beeps: int, drawn: np.random.Generator) -> np.ndarray:
    """Returns samples between -1 and 1 with so many beeps."""
    shortest = MOST * (BEEP + PAUSE)
    length = int(RATE * drawn.uniform(shortest, 1.0))
    rest = length / RATE - beeps * (BEEP + PAUSE)
    waits = drawn.dirichlet(np.ones(beeps + 1)) * rest  # before, between and after them
    sound = 0.01 * drawn.standard_normal(length)
    at = np.arange(int(BEEP * RATE)) / RATE
    tone = drawn.uniform(0.3, 0.8) * np.sin(2 * np.pi * drawn.choice(PITCHES) * at)
    begin = 0.0
    for wait in waits[:beeps]:
        begin += wait
        first = int(begin * RATE)
        sound[first : first + len(tone)] += tone
        begin += BEEP + PAUSE
    return sound


def save_wav(path: Path, samples: np.ndarray) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((samples.clip(-1, 1) * 32767).astype("<i2").tobytes())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/beeps/data"))
    write(parser.parse_args().folder)
