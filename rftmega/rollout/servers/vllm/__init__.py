"""Code that runs inside a vLLM server of a run: authentication, the lease by one run at a time, and
the WebSocket for completions with its protocol.
"""
