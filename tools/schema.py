"""Writes the JSON schema of config files, with which an editor completes options, shows their
descriptions and underlines typos.

    rftmega schema > rftmega.schema.json
    rftmega schema my.yaml > my.schema.json      # with the options of the plugins that my.yaml names

A config file names its schema in its first line, relative to its own folder:

    # yaml-language-server: $schema=rftmega.schema.json

VS Code reads this line with Red Hat's extension "YAML", Neovim and other editors with
yaml-language-server.
"""

import argparse
import json
import sys

from rftmega.core.errors import exit_code_of


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "config", nargs="?", metavar="CONFIG", help="a YAML file with plugins of your own"
    )
    return exit_code_of(write, parser.parse_args(given))


def write(chosen: argparse.Namespace) -> int:
    from rftmega.config import plugins_of
    from rftmega.run.json_schema import json_schema

    plugins = plugins_of(chosen.config) if chosen.config else ()
    sys.stdout.write(json.dumps(json_schema(plugins), indent=1, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
