"""Tool calling: data, a warm start, GRPO on 4 processes; then a plot and a summary in
runs/calculator.

Arguments are overrides of grpo.yaml, e.g. environment=single_turn, without the tool.
"""

from pathlib import Path

from rftmega.examples.arithmetic.demo import main

if __name__ == "__main__":
    main(Path(__file__).parent, "GRPO on products, with a calculator", __doc__)
