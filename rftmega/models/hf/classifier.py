"""Changes config.json to that of a value model."""

import json
from pathlib import Path

from rftmega.core.json_files import read_json_object


def say_classifier(path: Path) -> None:
    """Rewrites a config.json to describe a sequence classifier with one label, which is
    transformers' form of a value model.
    """
    config = read_json_object(path)
    config["architectures"] = [
        name.replace("ForCausalLM", "ForSequenceClassification")
        for name in config.get("architectures") or []
    ]
    config |= {"id2label": {"0": "reward"}, "label2id": {"reward": 0}, "num_labels": 1}
    path.write_text(json.dumps(config, indent=2))
