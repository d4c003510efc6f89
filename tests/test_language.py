"""The language of code and documents: one class name says one thing, a docstring begins with what
its subject does, and documents have short lines and sentences.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("rftmega", "converters", "model_providers")
KNOWN_BY_ITS_USERS = "rftmega/lightrft"  # keeps LightRFT's names: Experience and Samples
RIDDLES = ("Of", "What", "Whether", "As")
PLAIN_ROOMS = (
    "rftmega",
    "converters",
    "model_providers",
    "tools",
    "benchmarks",
    "examples",
    "website",
    "train_rl.py",
)
LONGEST_LINE = 160  # characters of a document's line, tables and code as well
LONGEST_SENTENCE = 16  # words, the median of a document
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def sources(root: Path, folders: tuple[str, ...]) -> Iterator[Path]:
    for folder in folders:
        path = root / folder
        yield from [path] if path.is_file() else sorted(path.rglob("*.py"))


def names_of_several_classes(root: Path) -> list[str]:
    """Lists each public name that more than one class has, with their files."""
    files = defaultdict(list)
    for path in sources(root, PACKAGES):
        where = path.relative_to(root)
        if where.is_relative_to(KNOWN_BY_ITS_USERS):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].append(f"{where}:{node.lineno}")
    return [
        f"{name}: {', '.join(places)}" for name, places in sorted(files.items()) if len(places) > 1
    ]


def riddles(root: Path, rooms: tuple[str, ...]) -> list[str]:
    """Lists the docstrings of the rooms that begin with a word of RIDDLES."""
    found = []
    for path in sources(root, rooms):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, Documented):
                continue
            first, *_ = (ast.get_docstring(node) or "").split(maxsplit=1) or [""]
            if first.rstrip(",:") in RIDDLES:
                line = node.body[0].lineno
                found.append(
                    f"{path.relative_to(root)}:{line}: a docstring begins with {first}: begin with what it does"
                )
    return found


def documents(root: Path) -> list[Path]:
    return sorted([*root.glob("*.md"), *root.glob("docs/*.md")])


def long_lines(root: Path) -> list[str]:
    """Lists the lines of the documents that are longer than LONGEST_LINE."""
    return [
        f"{path.relative_to(root)}:{number}: {len(line)} characters"
        for path in documents(root)
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if len(line) > LONGEST_LINE
    ]


def sentences(text: str) -> list[str]:
    """Returns the sentences of a document's paragraphs and lists; code, tables and titles have
    none.
    """
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    prose = [line for line in text.splitlines() if not line.startswith(("    ", "|", "#", "<!--"))]
    paragraphs = re.split(r"\n\s*\n|\n *(?:- |\d+\. )", "\n".join(prose))
    found = [sentence for part in paragraphs for sentence in re.split(r"(?<=[.!?])\s+", part)]
    return [sentence for sentence in found if re.search("[A-Za-z]", sentence)]


def wordy(root: Path) -> list[str]:
    """Lists the documents whose median sentence is longer than LONGEST_SENTENCE."""
    found = []
    for path in documents(root):
        words = [len(sentence.split()) for sentence in sentences(path.read_text())]
        if words and median(words) > LONGEST_SENTENCE:
            found.append(f"{path.relative_to(root)}: {median(words)} words in the median sentence")
    return found


def plant(root: Path, file: str, code: str) -> None:
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code)


def test_no_two_classes_have_one_name() -> None:
    assert names_of_several_classes(ROOT) == []


def test_no_docstring_begins_with_a_riddle() -> None:
    assert riddles(ROOT, PLAIN_ROOMS) == []


def test_every_room_that_is_listed_is_there() -> None:
    assert [room for room in PLAIN_ROOMS if not (ROOT / room).exists()] == []


def test_a_planted_second_class_of_a_name_is_found(tmp_path: Path) -> None:
    plant(tmp_path, "rftmega/weights/a.py", "class Shard: ...\nclass _Shard: ...")
    plant(tmp_path, "converters/b.py", "class Other: ...\n\nclass Shard: ...\nclass _Shard: ...")
    assert names_of_several_classes(tmp_path) == [
        "Shard: rftmega/weights/a.py:1, converters/b.py:3"
    ]


def test_a_name_of_lightrft_may_be_one_of_ours(tmp_path: Path) -> None:
    plant(tmp_path, "rftmega/core/types.py", "class Samples: ...")
    plant(tmp_path, "rftmega/lightrft/padded.py", "class Samples: ...")
    assert names_of_several_classes(tmp_path) == []


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ('"""What a push moves."""', 1),
        ('class Shard:\n    """Of one process."""', 2),
        ('def f():\n    """Whether it works."""', 2),
        ('class Shard:\n    async def f(self):\n        """As JSON has it."""', 3),
        ('def f():\n    def g():\n        """Of: one process."""', 3),
    ],
)
def test_a_planted_riddle_is_found(code: str, line: int, tmp_path: Path) -> None:
    plant(tmp_path, "rftmega/weights/bad.py", code)
    assert [found.split(": ")[0] for found in riddles(tmp_path, ("rftmega",))] == [
        f"rftmega/weights/bad.py:{line}"
    ]


@pytest.mark.parametrize(
    "text", ["Office hours.", "Asks an engine.", "Returns what a push moves.", "", "  "]
)
def test_a_plain_sentence_passes(text: str, tmp_path: Path) -> None:
    plant(tmp_path, "rftmega/weights/good.py", f'def f():\n    """{text}"""')
    assert riddles(tmp_path, ("rftmega/weights/good.py",)) == []


def test_documents_have_short_lines_and_sentences() -> None:
    assert long_lines(ROOT) == []
    assert wordy(ROOT) == []


def test_a_planted_long_line_and_long_sentences_are_found(tmp_path: Path) -> None:
    plant(tmp_path, "docs/a.md", "    " + "x" * 156 + "\n| " + "x" * 159 + "\n")
    plant(tmp_path, "README.md", f"{'word ' * 17}end. One.\n\n- {'word ' * 9}\n  {'word ' * 9}end.")
    assert long_lines(tmp_path) == ["docs/a.md:2: 161 characters"]
    assert wordy(tmp_path) == ["README.md: 18 words in the median sentence"]
    code = f"    code {'word ' * 30}\n\n```bash\n{'word ' * 30}.\n\n{'word ' * 30}.\n```\n"
    plant(tmp_path, "README.md", f"# Title\n\nOne two. Three.\n\n{code}")
    assert wordy(tmp_path) == []
