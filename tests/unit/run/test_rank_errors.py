from pathlib import Path

import pytest

from rftmega.core import errors
from rftmega.run.local_launcher import complaint_of


@pytest.mark.parametrize(
    ("name", "code", "kind"),
    [
        ("GapExceeded", 76, errors.GapExceeded),
        ("ConfigError", 2, errors.ConfigError),
        ("AnErrorOfAPlugin", 9, errors.RFTMegaError),
    ],
)
def test_an_error_of_a_rank_keeps_its_message_and_exit_code(
    name: str, code: int, kind: type[errors.RFTMegaError], tmp_path: Path
) -> None:
    complaint = tmp_path / "complaint"
    complaint.write_text(f"{name} {code}\nfirst line\nsecond line")
    found = complaint_of(complaint)
    assert type(found) is kind
    assert str(found) == "first line\nsecond line"
    assert found.exit_code == code
