"""The whole loop with audio on a laptop: data, a warm start of a small Qwen2-Audio, GRPO on 2
processes; the results are in runs/beeps.

Arguments are overrides of grpo.yaml, e.g. parallel.tensor=1 parallel.pipeline=2; --processes N
changes the number of processes.
"""

from pathlib import Path

if __name__ == "__main__":
    here = Path(__file__).parent
    from rftmega.examples.arithmetic.demo import main

    main(here, __doc__)
