"""One module per architecture, named like config.json's `model_type`, whose function `table`
returns the rules of all tensors.
"""
