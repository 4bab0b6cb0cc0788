"""The disk store: named bytes in a private directory, shared by any number of processes."""
