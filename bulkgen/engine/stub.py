"""An engine without a model: deterministic answers, continuous batching in miniature, faults on demand.

For tests and for scale tests of everything but the engine. It keeps the same contract, queues, counters and KV
accounting as a real one; only the tokens are made up. Its clock is the machine's.
"""

import heapq
import os
import random
import signal
import time
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bulkgen.engine.contract import EngineSettings
from bulkgen.errors import EngineError
from bulkgen.records import Completion, EngineLimits, EngineStats, Failure, Request

_BLOCK = 16
# Steps computed by one poll where steps take no time; only saves calls.
_FREE_STRIDE = 64
# The longest that one poll sleeps, so that its caller stays responsive.
_LONGEST_POLL_S = 0.05


@dataclass(slots=True)
class _Running:
    request: Request
    output_tokens: int
    arrived: float
    scheduled: float
    blocks: int


class StubEngine:
    """Answers `echo:` and the prompt; the number of output tokens follows from the seed and the prompt alone."""

    def __init__(self, settings: EngineSettings) -> None:
        s = settings.stub
        self._seed: int = s.get("seed", 0)
        self._step_s: float = s.get("step_s", 0.0)
        self._fixed: int | None = s.get("output_tokens")
        self._fail_rate: float = s.get("fail_rate", 0.0)
        self._echoes = settings.model == "stub"
        self._dies_after = _nth(s.get("die_at"), settings.incarnation)
        self._hangs_after = _nth(s.get("hang_at"), settings.incarnation)
        self._random = random.Random(f"{self._seed}/{settings.incarnation}") if s.get("shuffle") else None
        time.sleep(s.get("start_s", 0.0))
        if settings.incarnation < s.get("die_on_start", 0):
            raise EngineError(f"stub: told to die at start {settings.incarnation}")
        self.limits = EngineLimits(
            max_model_len=settings.args.get("max_model_len", 1 << 20),
            kv_tokens=s.get("kv_tokens", 1 << 20) // _BLOCK * _BLOCK,
            block_size=_BLOCK,
            max_num_seqs=settings.args.get("max_num_seqs", 256),
        )
        self._blocks_free = self.limits.kv_tokens // _BLOCK
        self._waiting: deque[tuple[Request, float]] = deque()
        self._refused: list[Failure] = []
        self._running: list[tuple[int, int, _Running]] = []  # heap by the step at which a request ends
        self._step = 0
        self._finished = 0
        self._prompt_tokens = self._output_tokens = 0

    def submit(self, requests: Sequence[Request]) -> None:
        now = time.monotonic()
        for request in requests:
            blocks = self._blocks(request, self._length(request))
            if self._fail_rate and self._draw(request, 1) < self._fail_rate:
                self._refused.append(Failure(request.index, "refused_by_engine", "stub: told to refuse this row"))
            elif blocks > self.limits.kv_tokens // _BLOCK:
                self._refused.append(Failure(request.index, "refused_by_engine", "stub: larger than the KV cache"))
            else:
                self._waiting.append((request, now))

    def poll(self) -> list[Completion | Failure]:
        done: list[Completion | Failure] = list(self._refused)
        self._refused.clear()
        self._admit()
        if self._running:
            steps = self._stride()
            self._step += steps
            time.sleep(steps * self._step_s)
            now = time.monotonic()
            while self._running and self._running[0][0] <= self._step:
                done.append(self._complete(heapq.heappop(self._running)[2], now))
                self._misbehave()
        if self._random is not None:
            self._random.shuffle(done)
        return done

    def _stride(self) -> int:
        if not self._step_s:
            return max(self._running[0][0] - self._step, _FREE_STRIDE)
        to_next_end = self._running[0][0] - self._step
        return max(1, min(to_next_end, int(_LONGEST_POLL_S / self._step_s)))

    def _admit(self) -> None:
        now = time.monotonic()
        while self._waiting and len(self._running) < self.limits.max_num_seqs:
            request, arrived = self._waiting[0]
            tokens = self._length(request)
            blocks = self._blocks(request, tokens)
            if blocks > self._blocks_free:
                break
            self._waiting.popleft()
            self._blocks_free -= blocks
            self._prompt_tokens += len(request.tokens)
            running = _Running(request, tokens, arrived, now, blocks)
            heapq.heappush(self._running, (self._step + tokens, request.index, running))

    def _complete(self, r: _Running, now: float) -> Completion:
        self._blocks_free += r.blocks
        self._output_tokens += r.output_tokens
        self._finished += 1
        e2e_s = now - r.arrived
        queued_s = r.scheduled - r.arrived
        ttft_s = queued_s + (e2e_s - queued_s) / r.output_tokens
        return Completion(
            index=r.request.index,
            text=self._text(r.request),
            finish_reason="stop" if r.output_tokens < r.request.sampling["max_tokens"] else "length",
            prompt_tokens=len(r.request.tokens),
            cached_tokens=0,
            output_tokens=r.output_tokens,
            queued_s=queued_s,
            ttft_s=ttft_s,
            tpot_s=(e2e_s - ttft_s) / (r.output_tokens - 1) if r.output_tokens > 1 else None,
            e2e_s=e2e_s,
        )

    def _misbehave(self) -> None:
        if self._dies_after is not None and self._finished >= self._dies_after:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._hangs_after is not None and self._finished >= self._hangs_after:
            while True:
                time.sleep(3600)

    def stats(self) -> EngineStats:
        blocks = self.limits.kv_tokens // _BLOCK
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_usage=1 - self._blocks_free / blocks if blocks else 0.0,
            preemptions=0,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=0,
            output_tokens=self._output_tokens,
        )

    def close(self) -> None:
        self._waiting.clear()
        self._running.clear()

    def _text(self, request: Request) -> str:
        if not self._echoes:
            return f"echo:{_checksum(request, 0):08x}"
        # The stub model's tokens are three bytes of UTF-8 each, little end first.
        ids = np.asarray(request.tokens, "<i4").view(np.uint8).reshape(-1, 4)
        return "echo:" + ids[:, :3].tobytes().rstrip(b"\0").decode(errors="replace")

    def _length(self, request: Request) -> int:
        most: int = request.sampling["max_tokens"]
        wanted = self._fixed if self._fixed is not None else 1 + int(self._draw(request, 0) * most)
        return max(1, min(wanted, most))

    def _draw(self, request: Request, salt: int) -> float:
        return _checksum(request, self._seed * 2 + salt) / 2**32

    @staticmethod
    def _blocks(request: Request, output_tokens: int) -> int:
        return -(-(len(request.tokens) + output_tokens) // _BLOCK)


def _checksum(request: Request, seed: int) -> int:
    return zlib.crc32(np.asarray(request.tokens, "<i4").tobytes(), seed)


def _nth(values: Any, incarnation: int) -> int | None:
    """The fault of this incarnation: a list has one entry an incarnation, a number means the first only."""
    if isinstance(values, int):
        values = [values]
    return values[incarnation] if values and incarnation < len(values) else None
