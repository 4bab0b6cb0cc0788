"""Values of variables: where they live, when a copy is valid, how they move."""
