"""Steps that run on other processes: `Session(target=...)`."""
