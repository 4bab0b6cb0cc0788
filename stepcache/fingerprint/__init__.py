"""What a step's code depends on, as named facts; and what a trace of it really used."""
