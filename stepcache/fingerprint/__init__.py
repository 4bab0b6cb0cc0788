"""What a step's code depends on, as named dependencies; and what a trace of it really used."""
