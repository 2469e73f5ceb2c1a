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
from dataclasses import dataclass, replace
from typing import Any

from bulkgen.engine.contract import EngineSettings
from bulkgen.engine.samples import together
from bulkgen.engine.stub_answers import StubAnswers, checksum, token_ids
from bulkgen.errors import EngineError
from bulkgen.records import Completion, EngineLimits, EngineStats, Failure, Request

_BLOCK = 16
# Steps computed by one poll where steps take no time; only saves calls.
_FREE_STRIDE = 64
# The longest that one poll sleeps, so that its caller stays responsive.
_LONGEST_POLL_S = 0.05


@dataclass(slots=True)
class _Answer:
    """One of the answers to a request; each takes a place in the batch of its own, as in vLLM."""

    request: Request
    sample: int
    output_tokens: int
    blocks: int
    arrived: float
    scheduled: float = 0.0


class StubEngine:
    """Answers `echo:` and the prompt; the number of output tokens follows from the seed and the prompt alone."""

    def __init__(self, settings: EngineSettings) -> None:
        s = settings.stub
        self._seed: int = s.get("seed", 0)
        self._step_s: float = s.get("step_s", 0.0)
        self._fail_rate: float = s.get("fail_rate", 0.0)
        self._answers = StubAnswers(settings)
        self._dies_after = _nth(s.get("die_at"), settings.incarnation)
        self._hangs_after = _nth(s.get("hang_at"), settings.incarnation)
        self._poison = tuple(s.get("poison", ()))
        self._stuck = tuple(s.get("stuck", ()))
        self._flaky_rate: float = s.get("flaky_rate", 0.0)
        first = settings.incarnation == 0
        self._double_rate, self._lose_rate, self._swap_rate = (
            s.get(name, 0.0) if first else 0.0 for name in ("double_rate", "lose_rate", "swap_rate")
        )
        self._errs = bool(self._double_rate or self._lose_rate or self._swap_rate)
        self._tried: set[bytes] = set()
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
        self._waiting: deque[_Answer] = deque()
        self._refused: list[Failure] = []
        self._running: list[tuple[int, int, int, _Answer]] = []  # heap by the step at which an answer ends
        self._parts: dict[int, dict[int, Completion]] = {}  # finished answers to requests for several
        self._hanging: list[_Answer] = []  # will never end
        self._step = 0
        self._finished = 0
        self._prompt_tokens = self._output_tokens = 0

    def submit(self, requests: Sequence[Request]) -> None:
        now = time.monotonic()
        for request in requests:
            answers = [self._answer(request, sample, now) for sample in range(request.sampling.get("n") or 1)]
            if self._flaky_rate and self._fails_once(request):
                self._refused.append(Failure(request.index, "ended_by_engine", "stub: told to fail once", True))
            elif self._fail_rate and self._draw(request, 1) < self._fail_rate:
                self._refused.append(Failure(request.index, "refused_by_engine", "stub: told to refuse this row"))
            elif max([answer.blocks for answer in answers]) > self.limits.kv_tokens // _BLOCK:
                self._refused.append(Failure(request.index, "refused_by_engine", "stub: larger than the KV cache"))
            elif (fault := self._answers.fault(request)) is not None:
                self._refused.append(Failure(request.index, "bad_schema", f"stub: {fault}"))
            else:
                self._waiting.extend(answers)

    def _answer(self, request: Request, sample: int, now: float) -> _Answer:
        tokens = self._answers.length(request, sample)
        return _Answer(request, sample, tokens, -(-(len(request.tokens) + tokens) // _BLOCK), now)

    def _fails_once(self, request: Request) -> bool:
        key = token_ids(request).tobytes()
        if key in self._tried or self._draw(request, 2) >= self._flaky_rate:
            return False
        self._tried.add(key)
        return True

    def cancel(self, indices: Sequence[int]) -> None:
        gone = set(indices)
        self._refused = [f for f in self._refused if f.index not in gone]
        self._waiting = deque(a for a in self._waiting if a.request.index not in gone)
        ended = [r for r in [*self._hanging, *(entry[-1] for entry in self._running)] if r.request.index in gone]
        self._blocks_free += sum(r.blocks for r in ended)
        self._hanging = [r for r in self._hanging if r.request.index not in gone]
        self._running = [entry for entry in self._running if entry[-1].request.index not in gone]
        heapq.heapify(self._running)
        for index in gone:
            self._parts.pop(index, None)

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
                done += self._ended(heapq.heappop(self._running)[-1], now)
        elif self._hanging:
            time.sleep(self._step_s)
        if self._random is not None:
            self._random.shuffle(done)
        return done

    def _ended(self, ended: _Answer, now: float) -> list[Completion]:
        """What comes back now that one answer has ended: nothing until all of its request have."""
        request = ended.request
        answer = self._complete(ended, now)
        if request.sampling.get("n"):
            parts = self._parts.setdefault(request.index, {})
            parts[ended.sample] = answer
            if len(parts) < request.sampling["n"]:
                return []
            del self._parts[request.index]
            answers = [parts[sample] for sample in sorted(parts)]
            short = self._answers.is_short(request) and len(answers) > 1
            answer = together(answers[:-1] if short else answers)
        self._finished += 1
        returned = self._returned(answer)
        self._misbehave()
        return returned

    def _returned(self, done: Completion) -> list[Completion]:
        """What comes back for a finished request: itself, unless the engine was told to err."""
        if not self._errs:
            return [done]
        luck = zlib.crc32(done.index.to_bytes(8, "little"), self._seed) / 2**32
        for rate, wrong in (
            (self._double_rate, [done, done]),
            (self._lose_rate, []),
            (self._swap_rate, [replace(done, prompt_tokens=done.prompt_tokens + 1)]),
        ):
            if luck < rate:
                return wrong
            luck -= rate
        return [done]

    def _stride(self) -> int:
        if not self._step_s:
            return max(self._running[0][0] - self._step, _FREE_STRIDE)
        to_next_end = self._running[0][0] - self._step
        return max(1, min(to_next_end, int(_LONGEST_POLL_S / self._step_s)))

    def _admit(self) -> None:
        now = time.monotonic()
        while self._waiting and len(self._running) + len(self._hanging) < self.limits.max_num_seqs:
            answer = self._waiting[0]
            if answer.blocks > self._blocks_free:
                break
            self._waiting.popleft()
            self._blocks_free -= answer.blocks
            answer.scheduled = now
            request = answer.request
            self._prompt_tokens += len(request.tokens)
            text = self._answers.prompt(request) if self._poison or self._stuck else ""
            if any(marker in text for marker in self._poison):
                os.kill(os.getpid(), signal.SIGKILL)
            if any(marker in text for marker in self._stuck):
                self._hanging.append(answer)
                continue
            heapq.heappush(self._running, (self._step + answer.output_tokens, request.index, answer.sample, answer))

    def _complete(self, r: _Answer, now: float) -> Completion:
        self._blocks_free += r.blocks
        self._output_tokens += r.output_tokens
        e2e_s = now - r.arrived
        queued_s = r.scheduled - r.arrived
        ttft_s = queued_s + (e2e_s - queued_s) / r.output_tokens
        return Completion(
            index=r.request.index,
            text=self._answers.text(r.request, r.sample),
            finish_reason="stop" if r.output_tokens < r.request.sampling["max_tokens"] else "length",
            prompt_tokens=len(r.request.tokens),
            cached_tokens=0,
            output_tokens=r.output_tokens,
            queued_s=queued_s,
            ttft_s=ttft_s,
            tpot_s=(e2e_s - ttft_s) / (r.output_tokens - 1) if r.output_tokens > 1 else None,
            e2e_s=e2e_s,
            logprobs=self._answers.logprobs(r.request, r.output_tokens),
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
            running=len(self._running) + len(self._hanging),
            waiting=len(self._waiting),
            kv_usage=1 - self._blocks_free / blocks if blocks else 0.0,
            preemptions=0,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=0,
            output_tokens=self._output_tokens,
            steps=self._step,
            step_s=self._step * self._step_s,
        )

    def close(self) -> None:
        self._waiting.clear()
        self._running.clear()
        self._hanging.clear()

    def _draw(self, request: Request, salt: int) -> float:
        return checksum(request, self._seed * 2 + salt) / 2**32


def _nth(values: Any, incarnation: int) -> int | None:
    """The fault of this incarnation: a list has one entry an incarnation, a number means the first only."""
    if isinstance(values, int):
        values = [values]
    return values[incarnation] if values and incarnation < len(values) else None
