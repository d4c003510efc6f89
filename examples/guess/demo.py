"""A model learns a game of several turns: data, a warm start, GRPO on 4 processes; then an image
and a summary in runs/guess.

Arguments are overrides of grpo.yaml, e.g. algorithm.advantage=group_norm.
"""

from pathlib import Path

from rftmega.examples.arithmetic.demo import main

if __name__ == "__main__":
    folder = Path(__file__).parent
    own = [f"plugins=[{folder / 'environment.py'}]"]  # wherever the demo is started
    main(folder, "GRPO on a guessing game", __doc__, own)
