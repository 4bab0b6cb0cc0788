"""How another process holds variables: one state machine, and engines that carry its messages."""
