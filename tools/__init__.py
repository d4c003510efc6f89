"""Command-line programs; `rftmega` runs them as subcommands."""
