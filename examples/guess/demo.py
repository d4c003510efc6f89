"""A multi-turn game: data, a warm start, GRPO on 4 processes; the results are in
runs/guess.

Arguments are overrides of grpo.yaml, e.g. algorithm.advantage=group_norm.
"""

from pathlib import Path

from rftmega.examples.arithmetic.demo import main

if __name__ == "__main__":
    folder = Path(__file__).parent
    own = [f"plugins=[{folder / 'environment.py'}]"]  # works from any folder
    main(folder, __doc__, own)
