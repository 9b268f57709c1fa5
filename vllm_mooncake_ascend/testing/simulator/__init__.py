"""Seeded simulation of transfers: the real machines among simulated engines, network, reads and accidents.

`plan` says what happens, `themes` draw it from a seed, `world` runs it; `engine`, `prefill`, `decode`, `workers` and
`client` are the host, as careless as a real one; `network` and `blocks` carry and hold the bytes. What must never be is a
`blocks.Violation`. `runner` runs many, shrinks what fails and counts coverage.
"""
