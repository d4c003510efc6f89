"""Images, videos and waveforms: safe reading of files, model inputs, and positions of features
among tokens.
"""
