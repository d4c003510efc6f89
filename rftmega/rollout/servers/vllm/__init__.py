"""This code runs inside a vLLM server of the run: its door, its socket, and what is said over that."""
