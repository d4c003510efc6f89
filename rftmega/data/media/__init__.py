"""Images: files that are read safely, what a model is fed of them, and where they stand among tokens."""
