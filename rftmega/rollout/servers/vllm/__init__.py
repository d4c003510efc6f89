"""Code that runs inside a run's vLLM server: authentication, ownership, the completions socket and
its protocol.
"""
