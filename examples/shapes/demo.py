"""The whole loop with images on a laptop: data, a warm start of a small Qwen2.5-VL, GRPO on 4
processes; the results are in runs/shapes.

Arguments are overrides of grpo.yaml, e.g. parallel.tensor=4 parallel.pipeline=1; --processes N
changes the number of processes.
"""

from pathlib import Path

if __name__ == "__main__":
    here = Path(__file__).parent
    from rftmega.examples.arithmetic.demo import main

    main(here, __doc__)
