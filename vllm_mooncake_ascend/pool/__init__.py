"""Machines of the prefix pool: lookups, loads, saves and the book of the scheduler; gets and puts of a worker."""
