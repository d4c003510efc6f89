"""The command `rftmega`, or `python -m rftmega`: what train_rl.py and the files of tools/ do, under
one name.

    rftmega COMMAND --help     what it takes
    rftmega --version
"""

import difflib
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from rftmega import __version__
from rftmega.runtime.parallel import preemption

COMMANDS = {
    "train": "train, here or in so many processes",
    "demo": "a small Qwen3 learns to add, on a CPU, with GRPO on 4 processes; --real: SmolLM2-135M learns it",
    "init": "write the YAML file of a first run: the quickest layout of your model that fits",
    "check": "check a model's folder on a CPU: template, stop tokens, logits, packing, export",
    "plan": "what a run takes: bytes by phase, seconds, the nearest layout that fits",
    "plan-sync": "what a push of the weights must move",
    "convert": "Hugging Face folder <-> Megatron's distributed checkpoint, and checksums",
    "inspect": "what is in a model's folder or checkpoint",
    "evaluate": "evaluate a model, or the policies of a run: pass@k, maj@k, intervals",
    "view": "a page of a run: curves, and trajectories token by token",
    "export-messages": "a run's trajectories as JSON lines of chat messages",
    "serve": "run vLLM servers on this host for a trainer on another",
    "launch": "write the file for Slurm, and submit it",
    "replay": "look at completions that engine and trainer disagree about",
    "schema": "print the JSON schema of config files, for editors",
    "completion": "print a script that completes these commands: bash, zsh",
}
TOOLS = {
    "plan-sync": "plan_sync",
    "inspect": "inspect_checkpoint",
    "export-messages": "export_messages",
}
REAL = "--real"  # of `rftmega demo`
REQUIREMENTS = Path(__file__).with_name("requirements")
BASH = """_rftmega() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}"
    if [ "$COMP_CWORD" = 1 ]; then
        COMPREPLY=($(compgen -W "{commands}" -- "$word"))
    elif [ "${{COMP_WORDS[1]}}" = train ] || [ "${{COMP_WORDS[1]}}" = plan ]; then
        COMPREPLY=($(compgen -f -- "$word") $(compgen -S = -W "{options}" -- "$word"))
    else
        COMPREPLY=($(compgen -f -- "$word"))
    fi
}}
complete -o nospace -o filenames -F _rftmega rftmega
"""


def main() -> int:
    """Runs the command that the command line names. Returns its exit code."""
    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        sys.stdout.write(_listed())
        return 0
    if name == "--version":
        sys.stdout.write(f"rftmega {__version__}\n")
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        told = f"Did you mean {near[0]}?" if near else f"Commands: {', '.join(COMMANDS)}."
        sys.stderr.write(f"error: rftmega has no command {name!r}. {told}\n")
        return 2
    sys.argv = [f"rftmega {name}", *rest]  # as help and errors call it
    try:
        return _run(name, rest)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "rftmega":
            raise
        sys.stderr.write(f"error: `rftmega {name}` needs {error.name}, {_missing()}\n")
        return 2


def _run(name: str, rest: Sequence[str]) -> int:
    if name == "train":
        preemption.listen()  # before anything that takes time
        from rftmega.run import api, command_line

        api.prepare()
        return command_line.run("Trains a language model by reinforcement.")
    if name == "demo":
        example = "arithmetic"
        if REAL in rest:
            sys.argv = [f"{sys.argv[0]} {REAL}", *(each for each in rest if each != REAL)]
            example = "smollm"
        import_module(f"rftmega.examples.{example}.demo").main()
        return 0
    if name == "completion":
        return _complete(rest)
    module = import_module(f"rftmega.tools.{TOOLS.get(name, name)}")
    tool: Callable[[list[str]], int] = module.main
    return tool(list(rest))


def _listed() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"    {name:<{width}}  {meaning}" for name, meaning in COMMANDS.items()]
    return f"{__doc__}\n" + "\n".join(lines) + "\n"


def _missing() -> str:
    """Returns the end of an error message: the pip commands that install the packages of a run."""
    stub = REQUIREMENTS / "torchvision_cpu"
    return (
        "which is not installed here. A run needs, without a GPU:\n"
        f"    pip install -r {REQUIREMENTS / 'torch.txt'}\n"
        f"    pip install --no-deps -r {REQUIREMENTS / 'cpu.txt'} {stub}\n"
        "and with CUDA:\n"
        f"    pip install --no-deps -r {REQUIREMENTS / 'cuda.txt'}"
    )


def _complete(rest: Sequence[str]) -> int:
    if list(rest) not in (["bash"], ["zsh"]):
        sys.stderr.write(
            "error: `rftmega completion` takes the name of a shell, bash or zsh; put\n"
            '    eval "$(rftmega completion bash)"\ninto ~/.bashrc.\n'
        )
        return 2
    from rftmega.config.tree import options

    if rest[0] == "zsh":
        sys.stdout.write("autoload -U +X bashcompinit && bashcompinit\n")
    script = BASH.format(commands=" ".join(COMMANDS), options=" ".join(options()))
    sys.stdout.write(script)
    return 0


if __name__ == "__main__":
    try:
        code = main()
    except BrokenPipeError:  # of `rftmega ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)
