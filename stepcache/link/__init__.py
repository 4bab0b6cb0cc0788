"""How two processes find each other, and notice that the other one has gone."""
