"""One module per architecture, named like config.json's `model_type`, with a `table` of all
tensors' rules.
"""
