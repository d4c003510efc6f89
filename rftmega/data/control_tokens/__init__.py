"""Control tokens of a tokenizer, and text that contains their names."""
