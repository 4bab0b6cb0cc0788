"""What a step is, what a call of it looks like, and where its arguments go."""
