"""The language of code and documents: one class name says one thing, a docstring begins with what
its subject does, and documents have short lines and sentences.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from statistics import median

import pytest

from rftmega.config.tree import options

ROOT = Path(__file__).parents[1]
PACKAGES = ("rftmega", "converters", "model_providers")
# they keep the names of others: Experience and Samples, MegatronActor
KNOWN_BY_THEIR_USERS = ("rftmega/lightrft", "rftmega/rlinf")
RIDDLES = ("Of", "What", "Whether", "As")
PLAIN = (
    "rftmega",
    "converters",
    "model_providers",
    "tools",
    "benchmarks",
    "examples",
    "website",
    "train_rl.py",
)
OLD_TERMS = {  # word of a name or a title -> the field's term
    **dict.fromkeys(("answer", "answers"), "completion, response or reply"),
    **dict.fromkeys(("picture", "pictures"), "image"),
    **dict.fromkeys(("mixture", "mixtures"), "MoE"),
    **dict.fromkeys(("fleet", "fleets"), "server group"),
    **dict.fromkeys(("roster", "rosters"), "server list"),
    **dict.fromkeys(("parcel", "parcels"), "payload"),
    **dict.fromkeys(
        ("learnt", "ear", "hear", "hears", "fed", "door", "standing"),
        "trained, audio, model inputs, ...",
    ),
    **dict.fromkeys(("eight_bits",), "fp8 or int8"),
}
KEPT_TERMS = (  # an answer is the ground truth, or what is extracted from a response
    *("rftmega/rewards/", "rftmega/sandbox/", "examples/", "reward.answer_pattern", "benchmarks/"),
    "Mixture-of-experts (MoE) models",  # the title that explains the term
)
MOST_WHAT = 0.01  # share of docstrings whose first sentence has "what" instead of a noun
LONGEST_LINE = 160  # characters of a document's line, tables and code as well
LONGEST_SENTENCE = 16  # words, the median of a document
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def sources(root: Path, folders: tuple[str, ...]) -> Iterator[Path]:
    for folder in folders:
        path = root / folder
        yield from [path] if path.is_file() else sorted(path.rglob("*.py"))


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def names_of_several_classes(root: Path) -> list[str]:
    """Lists each public name that more than one class has, with their files."""
    files = defaultdict(list)
    for path in sources(root, PACKAGES):
        where = path.relative_to(root)
        if any(map(where.is_relative_to, KNOWN_BY_THEIR_USERS)):
            continue
        for node in nodes(path):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].append(f"{where}:{node.lineno}")
    return [
        f"{name}: {', '.join(places)}" for name, places in sorted(files.items()) if len(places) > 1
    ]


def riddles(root: Path, folders: tuple[str, ...]) -> list[str]:
    """Lists the docstrings in the folders that begin with a word of RIDDLES."""
    found = []
    for path in sources(root, folders):
        for node in nodes(path):
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


def words_of(name: str) -> set[str]:
    """Returns the words of a name in snake_case or CamelCase, or of a title."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def names_in(root: Path) -> Iterator[str]:
    """Yields names of files, classes and functions, and titles of documents, each with its file."""
    for path in sources(root, PLAIN):
        where = path.relative_to(root)
        yield f"{where}: {path.stem}"
        for node in nodes(path):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{where}: {node.name}"
    for path in documents(root):
        yield f"{path.relative_to(root)}: {path.stem}"
        titles = re.findall(r"^#+ (.*)", path.read_text(), flags=re.MULTILINE)
        yield from (f"{path.relative_to(root)}: {title}" for title in titles)


def old_terms(names: Iterable[str]) -> list[str]:
    """Lists the names with a word of OLD_TERMS, apart from KEPT_TERMS."""
    return [
        f"{name}: write {OLD_TERMS[word]} for {word}"
        for name in names
        for word in sorted(words_of(name.rpartition(": ")[2]) & set(OLD_TERMS))
        if not any(kept in name for kept in KEPT_TERMS)
    ]


def vague(root: Path) -> list[str]:
    """Lists the docstrings whose first sentence has "what" instead of a noun."""
    found = []
    for path in sources(root, PACKAGES):
        for node in nodes(path):
            if isinstance(node, Documented):
                first = re.split(r"[.;:]\s|\n\n", ast.get_docstring(node) or "", maxsplit=1)[0]
                if re.search(r"\b[Ww]hat\b", first):
                    found.append(f"{path.relative_to(root)}: {first}")
    return found


def plant(root: Path, file: str, code: str) -> None:
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code)


def test_no_two_classes_have_one_name() -> None:
    assert names_of_several_classes(ROOT) == []


def test_no_docstring_begins_with_a_riddle() -> None:
    assert riddles(ROOT, PLAIN) == []


def test_names_titles_and_options_have_the_terms_of_the_field() -> None:
    assert old_terms(names_in(ROOT)) == []
    assert old_terms(f"option: {name}" for name in options()) == []


def test_a_planted_old_term_is_found(tmp_path: Path) -> None:
    plant(tmp_path, "rftmega/rollout/a.py", "class FleetMember: ...\n\n\ndef read_picture(): ...")
    plant(tmp_path, "rftmega/rewards/b.py", "def answer(): ...")
    plant(tmp_path, "docs/c.md", "# Mixtures of experts\n\nA picture of it.")
    assert old_terms(names_in(tmp_path)) == [
        "rftmega/rollout/a.py: FleetMember: write server group for fleet",
        "rftmega/rollout/a.py: read_picture: write image for picture",
        "docs/c.md: Mixtures of experts: write MoE for mixtures",
    ]


def test_docstrings_name_things_instead_of_what_they_do(tmp_path: Path) -> None:
    documented = sum(
        isinstance(node, Documented) and ast.get_docstring(node) is not None
        for path in sources(ROOT, PACKAGES)
        for node in nodes(path)
    )
    assert len(vague(ROOT)) <= MOST_WHAT * documented
    plant(tmp_path, "rftmega/a.py", 'def f():\n    """Returns what scores completions."""')
    plant(tmp_path, "rftmega/b.py", 'def f():\n    """Returns a reward. It is what scores."""')
    assert vague(tmp_path) == ["rftmega/a.py: Returns what scores completions."]


def test_every_folder_that_is_listed_exists() -> None:
    assert [folder for folder in PLAIN if not (ROOT / folder).exists()] == []


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
