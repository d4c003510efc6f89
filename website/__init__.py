"""The site of docs/: `make site` writes build/site. Nothing of it is installed."""
