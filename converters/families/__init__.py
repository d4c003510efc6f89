"""One module a family, named as config.json's `model_type`: its `table` gives the rules of every
tensor.
"""
