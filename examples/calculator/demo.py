"""Tool calling: data, a warm start, GRPO on 4 processes; the results are in
runs/calculator.

Arguments are overrides of grpo.yaml, e.g. environment=single_turn, without the tool.
"""

from pathlib import Path

from rftmega.examples.arithmetic.demo import main

if __name__ == "__main__":
    main(Path(__file__).parent, __doc__)
