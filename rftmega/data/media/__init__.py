"""Images, videos and waveforms: safe reading of files, model inputs, and positions among tokens."""
