"""The page about architectures on FSDP2 is what the sweep found."""

import json
from pathlib import Path

from website.architectures import architectures_page

NUMBERS = {
    "log-probs": 4.6e-7,
    "gradient": 2e-6,
    "steps": 3e-6,
    "push": 1e-6,
    "export": 1e-6,
    "resume": 0.0,
}


def test_the_page_has_a_table_of_each_outcome(tmp_path: Path) -> None:
    rows = [
        {"type": "fits", "verdict": "ok", **NUMBERS, "vllm": 2e-6},
        {"type": "differs", "verdict": "ok", **NUMBERS, "vllm": 0.03},
        {"type": "unknown", "verdict": "ok", **NUMBERS, "vllm": "vLLM | knows none."},
        {"type": "other", "verdict": "refused", "refused": "build: FOLDER | has <no> layers."},
    ]
    record = tmp_path / "architectures.json"
    found = {"command": "make sweep", "date": "2026-12-01", "machine": "CPU", "rows": rows}
    record.write_text(json.dumps(found))
    page = architectures_page(record)
    assert "| `fits` | 5e-07 | 2e-06 | 3e-06 | 1e-06 | 1e-06 | 0e+00 | 2e-06 |" in page
    assert "| `differs` | 5e-07 | 2e-06 | 3e-06 | 1e-06 | 1e-06 | 0e+00 | no |" in page
    assert "for these 2 types" in page
    assert "| `differs` | its log-probs differ by 0.03 |" in page
    assert "| `unknown` | vLLM \\| knows none. |" in page
    assert "## 3 types are trained" in page
    assert "| `other` | FOLDER \\| has &lt;no> layers. |" in page
    assert "could not be tried" not in page
