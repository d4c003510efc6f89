"""Data types, protocols and errors that every other subpackage uses. Start reading with types.py."""
