"""Joins the processes, places each in the layout and lets them talk.

`topology` alone reads Megatron's parallel state.
"""
