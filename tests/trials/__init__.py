"""What takes too long for `make test`: jobs on real vLLM that are killed, poisoned, or run out of disk.

`python -m tests.trials kills|poison|disk [--rows 200]` ends with an assertion error where a promise is broken.
"""
