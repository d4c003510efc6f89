"""Brings the policy's weights to servers: through memory of one host, a process group, or files."""
