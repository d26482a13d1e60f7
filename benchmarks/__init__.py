"""Benchmarks: each file stands behind a row of benchmarks/README.md."""
