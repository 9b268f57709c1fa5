"""A seeded simulation of engines with a prefix pool: the machines of production, a bad store, and laws checked as they run."""
