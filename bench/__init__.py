"""Benchmarks: what is meant to be fast, measured on this machine. Never part of the tests."""
