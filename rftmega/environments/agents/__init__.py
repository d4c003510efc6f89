"""Agents that bring their own loop speak to an endpoint of the API of OpenAI."""
