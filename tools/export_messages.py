"""Writes a run's trajectories as JSON lines of messages, in the format of OpenAI's chat API.

    rftmega export-messages runs/demo                                  # writes runs/demo/messages.jsonl
    rftmega export-messages runs/demo --step 20 --output step20.jsonl  # of one step
    jq -c 'select(.reward >= 1 and .exact)' runs/demo/messages.jsonl > given_answers.jsonl

Each line is a trajectory: "messages", "tools" if the run had any, "reward", "reward_parts", "step",
"group", "index" and "rollout". "weights" has a number for each message: 1 for messages that the
policy generated in this trajectory, 0 for the others. "exact" tells whether the chat template
reproduces the trajectory's tokens from these messages. trainer.trajectories sets how often a run
writes the files that this program reads (docs/monitoring.md).
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rftmega.core.errors import DataError, exit_code_of
from rftmega.monitoring.observers.run_chat import RunChat
from rftmega.monitoring.observers.trajectories import name_of
from rftmega.runtime.parallel.private import keep_private
from rftmega.tools.view import files_of, samples_of


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN_FOLDER", help="a run's output folder")
    parser.add_argument("--step", type=int, metavar="N", help="only this step (all that are there)")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE.jsonl",
        help="where to write (messages.jsonl in the run's folder)",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="HF_DIR",
        help="a folder with the run's tokenizer (the run's policy/, or model.path as it was given)",
    )
    return exit_code_of(export, parser.parse_args(given))


def export(chosen: argparse.Namespace) -> int:
    keep_private()
    files = chosen_files(chosen.run, chosen.step)
    chat = RunChat.read(files[0].parent)
    exporter = exporter_of(chat, tokenizer_folder(chosen.run, chosen.model, chat))
    target = chosen.output or chosen.run / "messages.jsonl"
    found = (exporter.exported(row) for file in files for row in samples_of(file))
    try:
        lines, exact = write(target, found)
    except OSError as error:
        raise DataError(
            f"{target} can't be written: {error.strerror}. Choose another --output."
        ) from error
    older = (
        "" if chat.chat else "; the run told neither its tools nor its system prompt (no chat.json)"
    )
    sys.stdout.write(
        f"wrote {target}: {lines} trajectories of {len(files)} step(s), {exact} exact{older}\n"
    )
    return 0


def chosen_files(run: Path, step: int | None) -> list[Path]:
    """Returns the trajectory files of a run, or only the file of step number `step`.

    Raises DataError if there is none.
    """
    if run.is_file():
        raise DataError(f"{run} is a file. Give the run's output folder; --step N takes one step.")
    files = files_of(run)
    if step is None:
        return files
    found = [file for file in files if file.name == name_of(step)]
    if not found:
        numbers = [int(file.name[5:11]) for file in files]
        raise DataError(
            f"--step {step} was not written to {files[0].parent}; there are {', '.join(map(str, numbers))}. Choose one of "
            "them, or set trainer.trajectories so that the run writes more."
        )
    return found


def tokenizer_folder(run: Path, given: Path | None, chat: RunChat) -> Path:
    """Returns the folder with the run's tokenizer: `given`, or the policy/ of the output folder
    `run`, or the run's model.path, which is in its chat settings `chat`.

    Raises DataError if none of them has a tokenizer.
    """
    tried = [given] if given else [run / "policy", *([Path(chat.model)] if chat.model else [])]
    for folder in tried:
        if (folder / "tokenizer_config.json").is_file() or (folder / "tokenizer.json").is_file():
            return folder
    raise DataError(
        f"There is no tokenizer in {' or in '.join(map(str, tried))}, and messages are read from tokens. Give --model, the "
        "folder that the run began with (model.path)."
    )


def exporter_of(chat: RunChat, folder: Path) -> Any:
    """Builds the MessageExporter that converts trajectories to messages. `chat`: the run's chat
    settings; `folder`: folder of its tokenizer.

    Raises CheckpointError or DataError if the folder's tokenizer or template can't be used.
    """
    from rftmega.data.chat.exported import MessageExporter
    from rftmega.data.chat.renderer import ConversationRenderer
    from rftmega.data.tokenizer import Chat, Tokenizer

    settings = Chat(**chat.chat) if chat.chat else Chat()
    tokenizer = Tokenizer(folder, chat=settings, control_tokens="control")
    try:
        tokenizer.template.source()
    except ValueError:  # no chat template: the run's prompts were plain text
        return MessageExporter(tokenizer, None)
    renderer = ConversationRenderer.of(tokenizer, chat.renderer, tool_parser=chat.tool_parser)
    return MessageExporter(tokenizer, renderer, settings.tools)


def write(target: Path, lines: Iterator[dict[str, Any]]) -> tuple[int, int]:
    """Writes one JSON object per line to a draft, which is renamed to `target` when it is complete.

    Returns the number of lines, and for how many of them "exact" is true (see above). Raises
    OSError if the file can't be written.
    """
    draft = target.with_name(f".{target.name}.draft")
    count = exact = 0
    with draft.open("wb") as file:
        for line in lines:
            text = json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n"
            file.write(text.encode("utf-8", "backslashreplace"))
            count += 1
            exact += line["exact"]
    draft.rename(target)
    return count, exact


if __name__ == "__main__":
    sys.exit(main())
