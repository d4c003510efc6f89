"""LightRFT's names over the parts of this package. Nothing in the package imports it."""
