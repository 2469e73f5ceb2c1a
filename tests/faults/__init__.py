"""Faults on demand: whole runs on the stub engine under a seeded schedule of faults, checked against a plain reference.

    seed → schedule (rows, job, faults of each start) → starts, with the hook inside each process → checks

`python -m tests.faults --seed 123` runs one schedule and tells what happens, `--seeds 0:500` many.
"""
