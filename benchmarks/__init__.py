"""Benchmarks: `python -m benchmarks` prints the table and writes build/bench.json."""
