"""Code that runs inside a vLLM server of a run: authentication, ownership, and the WebSocket for
completions with its protocol.
"""
