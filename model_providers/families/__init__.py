"""One module a family, named as config.json's `model_type`: its `describe` says what the family
adds to a decoder.
"""
