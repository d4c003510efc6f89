"""Conversations of many turns: messages become tokens, and answers are kept as they were sampled."""
