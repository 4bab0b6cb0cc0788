"""The wing of compiled programs: what a call looks like, the program it needs, and where it is."""
