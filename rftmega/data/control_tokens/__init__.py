"""Control tokens of a tokenizer, and text that has their names."""
