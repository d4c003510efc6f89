"""Builds the site of docs/: `make site` writes build/site. It is not installed with the package."""
