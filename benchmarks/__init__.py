"""Speed, measured: each module prints one table and writes one JSON file a run."""
