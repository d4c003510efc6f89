"""Chat messages of records: their published forms, and the form that a chat template reads."""
