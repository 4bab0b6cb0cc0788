"""Compiled programs: which program serves a call, and how it is found or built."""
