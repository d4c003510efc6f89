"""Multi-turn conversations: tokenizes messages, and keeps completions exactly as sampled."""
