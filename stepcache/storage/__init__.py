"""The disk tier: named bytes in a private directory, shared by any number of processes."""
