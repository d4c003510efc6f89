"""The only place where what is learnt meets where it runs.

`preflight` imports no Megatron, so that a refusal is quick.
"""
