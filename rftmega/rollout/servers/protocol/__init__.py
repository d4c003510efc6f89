"""Says what a trainer and one server say to each other, and what of the server's words is believed."""
