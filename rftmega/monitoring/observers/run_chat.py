"""The chat settings of a run (chat template, system prompt, tools), stored with its trajectories
for tools that read them later.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rftmega.config import RunConfig
from rftmega.config.options.agents import Agent
from rftmega.config.options.environments import Tools
from rftmega.core.errors import DataError
from rftmega.core.json_files import read_json_object

FILE = "chat.json"


@dataclass(frozen=True, slots=True)
class RunChat:
    """RunChat holds the settings, apart from the tokenizer, by which a run converts chat messages
    into tokens: chat template, system prompt, tools, and the formats of tool calls.
    """

    model: str = ""  # folder of the initial model
    renderer: str = "auto"
    tool_parser: str = "auto"
    # fields of data.Chat: system, template, given, tools
    chat: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, config: RunConfig, chat: Any) -> "RunChat":
        """Returns the settings of the run with this config. `chat`: the data.Chat of the run's
        tokenizer, which has chat template, system prompt and tools.
        """
        options = config.environment
        path, fields = config.model.path, asdict(chat)
        if isinstance(options, Tools | Agent):
            return cls(path, options.renderer, options.tool_parser, fields)
        return cls(path, chat=fields)

    def write(self, folder: Path) -> None:
        """Writes the settings to chat.json in `folder`, a folder of trajectories."""
        text = json.dumps(asdict(self), ensure_ascii=False, indent=1)
        (folder / FILE).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "RunChat":
        """Returns the settings that a run wrote to chat.json in `folder`, a folder of trajectories;
        the defaults if the file does not exist, as in older runs.

        Raises DataError if the file is invalid.
        """
        path = folder / FILE
        if not path.is_file():
            return cls()
        fields = read_json_object(path, raising=DataError)
        known = {"model": str, "renderer": str, "tool_parser": str, "chat": dict}
        wrong = [name for name, kind in known.items() if not isinstance(fields.get(name), kind)]
        if wrong or fields.keys() - known:
            named = [*wrong, *sorted(fields.keys() - known)]
            raise DataError(
                f"{path} is not as a run writes it: look at {', '.join(named)}. Restore the file, or remove it: then the "
                "chat template of --model counts, without tools and without a system prompt of the run."
            )
        return cls(**fields)
