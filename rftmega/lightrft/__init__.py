"""Compatibility layer that offers LightRFT's API on top of rftmega. No other package of rftmega
imports it.
"""
