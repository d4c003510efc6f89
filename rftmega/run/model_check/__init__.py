"""Checks a model folder before a run: config, weights, tokenizer, chat template, log-probs, export."""
