"""Hooks of mkdocs for generated pages, lists, links and formulas."""

import logging
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from website import formulas
from website.architectures import PAGE, architectures_page
from website.links import GENERATED, PAGES, of_the_site
from website.lists import for_python_markdown
from website.options_page import options_page
from website.python_api import PAGE as PYTHON_API
from website.python_api import python_api_page
from website.reference_api import SYSTEMS, names_page

ROOT = Path(__file__).parents[1]
SOURCES = {page: file for file, page in PAGES.items()}
warn = logging.getLogger("mkdocs.hooks").warning  # an error under --strict


def on_config(config: Any) -> Any:
    """Registers the renderer of formulas."""
    fences = config.mdx_configs.setdefault("pymdownx.superfences", {})
    fences["custom_fences"] = [{"name": "math", "class": "formula", "format": formulas.block}]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that have no file in docs/."""
    for page, source in SOURCES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    files.append(File.generated(config, "options.md", content=options_page()))
    files.append(File.generated(config, PAGE, content=architectures_page()))
    files.append(File.generated(config, PYTHON_API, content=python_api_page()))
    for system in SYSTEMS:
        name = f"{system.lower()}_names.md"
        files.append(File.generated(config, name, content=names_page(system)))
    schema = (ROOT / "rftmega.schema.json").read_text()
    files.append(File.generated(config, "rftmega.schema.json", content=schema))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Returns a page's text with links and lists converted for Python-Markdown."""
    uri = page.file.src_uri
    if f"docs/{uri}" in GENERATED:
        return markdown
    source = SOURCES.get(uri, f"docs/{uri}")
    return for_python_markdown(of_the_site(markdown, source, ROOT, warn))
