"""Protocol between the trainer and one server, and validation of the server's replies."""
