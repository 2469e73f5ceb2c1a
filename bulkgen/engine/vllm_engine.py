"""vLLM behind the engine contract: one `LLMEngine`, fed with token ids and stepped by the caller.

`LLMEngine.step` rather than `AsyncLLM`: the caller's loop is the only user and needs neither an event loop nor a task
a request; in speed they do not differ beyond noise on the CPU (`python -m bench driver`). Settings keep vLLM's names;
defaults are vLLM's own.
"""

import contextlib
import sys
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from vllm import EngineArgs, LLMEngine, SamplingParams, envs
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

from bulkgen.engine.contract import EngineSettings
from bulkgen.engine.memory import memory_cure
from bulkgen.engine.samples import together
from bulkgen.errors import EngineError
from bulkgen.records import Completion, EngineLimits, EngineStats, Failure, Logprobs, Request

# What a generated answer can end with; vLLM's other reasons (abort, error) mean that there is none.
_FINISHED = ("stop", "length", "repetition")


# Of an engine that computes beside its caller: a step is under way, and perhaps one more is scheduled.
_LAG_STEPS = 2


class _Counters(StatLoggerBase):  # type: ignore[misc]  # vLLM is not read by the type checker
    """vLLM hands every step's statistics to this object; counters add up over the life of the engine."""

    def __init__(self, vllm_config: Any = None, engine_index: int = 0) -> None:
        self.running = self.waiting = self.preemptions = 0
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.kv_usage = 0.0

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if scheduler_stats is not None:
            self.running = scheduler_stats.num_running_reqs
            self.waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            self.kv_usage = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            self.preemptions += iteration_stats.num_preempted_reqs
            self.output_tokens += iteration_stats.num_generation_tokens
            self.prompt_tokens += iteration_stats.prompt_token_stats.total
            self.cached_tokens += iteration_stats.prompt_token_stats.cached_tokens

    def log_engine_initialized(self) -> None:
        """Nothing to say; vLLM's own loggers write the engine log."""


@dataclass(slots=True)
class _Open:
    """A request that is in vLLM: under one name for each of its answers, in their order.

    `has_text` says whether vLLM itself makes the text, `several` whether the answers come back as samples.
    """

    index: int
    names: list[str]
    several: bool
    has_text: bool
    has_form: bool
    answers: dict[str, Completion] = field(default_factory=dict)


class VllmEngine:
    """One vLLM engine in this process (and, where vLLM chooses so, its core and workers in children).

    Several answers to a request are requests of their own to vLLM. Its own way of asking for several (`n`) does the
    same inside, and then tells the times and the cached tokens of the last one only.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self._counters = _Counters()
        self._open: dict[str, _Open] = {}  # by the name of each answer
        self._refused: list[Failure] = []
        self._taken = 0
        self._steps, self._step_s = 0, 0.0
        try:
            # LLM_CLASS gives the defaults for offline use; the default context silently caps batch and sequences.
            self._engine = LLMEngine.from_engine_args(
                EngineArgs(
                    model=settings.model,
                    revision=settings.revision,
                    disable_log_stats=False,
                    **settings.args,
                ),
                usage_context=UsageContext.LLM_CLASS,
                stat_loggers=[lambda config, index: self._counters],
            )
        except Exception as e:  # whatever stops vLLM from loading, the user sees it as one kind of error
            words = f"vLLM could not load {settings.model}: {_last_words(e)}"
            cure = memory_cure(f"{type(e).__name__}: {e}")
            raise EngineError(f"{words}; {cure}" if cure else words) from e
        config = self._engine.vllm_config
        # Whether steps are computed beside the caller: by a core in a process of its own, or several at a time.
        self._beside = bool(envs.VLLM_ENABLE_V1_MULTIPROCESSING or config.scheduler_config.async_scheduling)
        self._stepped_at = 0.0
        cache = config.cache_config
        self.limits = EngineLimits(
            max_model_len=config.model_config.max_model_len,
            # vLLM does not start unless one sequence of max_model_len fits, however its layers share the blocks.
            kv_tokens=max(cache.num_gpu_blocks or 0, -(-config.model_config.max_model_len // cache.block_size))
            * cache.block_size,
            block_size=cache.block_size,
            max_num_seqs=config.scheduler_config.max_num_seqs,
            kv_cache_size_tokens=cache.kv_cache_size_tokens,
            max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
            lag_steps=_LAG_STEPS if self._beside else 0,
        )
        self._tokenizer = self._engine.renderer.tokenizer

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            sampling = dict(request.sampling)
            number = sampling.pop("n", None)
            # Text is made once at the end; only stop strings and log probabilities need it at every token.
            has_text = bool(sampling.get("stop")) or sampling.get("logprobs") is not None
            form = sampling.pop("structured_outputs", None)
            # No name is used again: of a row that is tried once more, nothing of the first time may count.
            self._taken += 1
            names = [f"{request.index}.{i}-{self._taken}" for i in range(number or 1)]
            opened = _Open(request.index, [], number is not None, has_text, form is not None)
            try:
                for i, name in enumerate(names):
                    params = SamplingParams(
                        **_seeded(sampling, i),
                        structured_outputs=None if form is None else _structured(form),
                        output_kind=RequestOutputKind.FINAL_ONLY,
                        detokenize=has_text,
                        flat_logprobs=True,
                    )
                    self._engine.add_request(name, {"prompt_token_ids": list(request.tokens)}, params)
                    opened.names.append(name)
            except EngineDeadError as e:
                raise EngineError(f"vLLM died: {_last_words(e)}") from e
            except Exception as e:  # vLLM checks a request while it takes it, with errors of many kinds
                self._abort(opened.names)
                # What names no parameter is the one thing that cannot be checked before: the form asked for.
                is_form = form is not None and getattr(e, "parameter", None) is None
                code = "bad_schema" if is_form else "refused_by_engine"
                self._refused.append(Failure(request.index, code, _last_words(e)))
                continue
            self._open.update(dict.fromkeys(names, opened))

    def cancel(self, indices: Sequence[int]) -> None:
        gone = set(indices)
        self._refused = [failure for failure in self._refused if failure.index not in gone]
        self._drop([opened for opened in self._open.values() if opened.index in gone])

    def _drop(self, requests: Sequence[_Open]) -> None:
        """Let go of requests, with all their answers."""
        names = [name for opened in requests for name in opened.names if self._open.pop(name, None) is not None]
        self._abort(names)

    def _abort(self, names: list[str]) -> None:
        try:
            self._engine.abort_request(names)
        except Exception as e:  # as in step
            raise EngineError(f"vLLM died: {_last_words(e)}") from e

    def poll(self) -> list[Completion | Failure]:
        done: list[Completion | Failure] = list(self._refused)
        self._refused.clear()
        if not self._open:
            return done
        began = (self._beside and self._stepped_at) or time.monotonic()
        try:
            outputs = self._engine.step()
        except Exception as e:  # vLLM raises whatever its core died of
            raise EngineError(f"vLLM died: {_last_words(e)}") from e
        self._steps += 1
        now = time.monotonic()
        self._step_s += now - began
        for output in outputs:
            if output.finished and isinstance(output, RequestOutput):
                done += self._ended(output)
        self._stepped_at = now if self._open else 0.0
        return done

    def _ended(self, output: RequestOutput) -> list[Completion | Failure]:
        """What comes back now that one answer has ended: nothing until all of its request have."""
        opened = self._open.pop(output.request_id, None)
        if opened is None:
            return []  # cancelled in the meantime
        result = self._result(output, opened)
        if isinstance(result, Failure):
            self._drop([opened])
            return [result]
        if not opened.several:
            return [result]
        opened.answers[output.request_id] = result
        if len(opened.answers) < len(opened.names):
            return []
        return [together([opened.answers[name] for name in opened.names])]

    def _result(self, output: RequestOutput, opened: _Open) -> Completion | Failure:
        answer = output.outputs[0]
        if answer.finish_reason not in _FINISHED:
            return _failure(answer.finish_reason, bool(answer.token_ids), opened)
        metrics = output.metrics
        text = answer.text
        if not opened.has_text:
            text = self._tokenizer.decode(list(answer.token_ids), skip_special_tokens=True)
        queued_s = ttft_s = e2e_s = 0.0
        if metrics is not None:
            queued_s = metrics.scheduled_ts - metrics.queued_ts
            ttft_s = metrics.first_token_ts - metrics.queued_ts
            e2e_s = metrics.last_token_ts - metrics.queued_ts
        tokens = len(answer.token_ids)
        return Completion(
            index=opened.index,
            text=text,
            finish_reason=answer.finish_reason,
            prompt_tokens=len(output.prompt_token_ids or ()),
            cached_tokens=output.num_cached_tokens or 0,
            output_tokens=tokens,
            queued_s=queued_s,
            ttft_s=ttft_s,
            tpot_s=(e2e_s - ttft_s) / (tokens - 1) if tokens > 1 else None,
            e2e_s=e2e_s,
            logprobs=None if answer.logprobs is None else _logprobs(answer.logprobs),
        )

    def stats(self) -> EngineStats:
        c = self._counters
        return EngineStats(
            running=c.running,
            # Requests that were added since the last step are not in the scheduler's own count yet.
            waiting=max(0, self._engine.get_num_unfinished_requests() - c.running),
            kv_usage=c.kv_usage,
            preemptions=c.preemptions,
            prompt_tokens=c.prompt_tokens,
            cached_tokens=c.cached_tokens,
            output_tokens=c.output_tokens,
            steps=self._steps,
            step_s=self._step_s,
        )

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._engine.engine_core.shutdown()


def _seeded(sampling: Mapping[str, Any], sample: int) -> dict[str, Any]:
    """The parameters of one answer: each has a seed of its own, the first the request's."""
    seed = sampling.get("seed")
    if seed is None or not sample:
        return dict(sampling)
    # Away from -1, which vLLM takes for none, and within 64 bits.
    other = seed + sample if seed >= 0 else seed - sample
    return {**sampling, "seed": (other + 2**63) % 2**64 - 2**63}


def _structured(form: Mapping[str, Any]) -> StructuredOutputsParams:
    return StructuredOutputsParams(**{"json" if kind == "json_schema" else kind: v for kind, v in form.items()})


def _failure(reason: str | None, has_tokens: bool, opened: _Open) -> Failure:
    if reason == "error" and opened.has_form and not has_tokens:
        # vLLM compiles the form after it has taken the request, and says no more than this to the caller.
        return Failure(opened.index, "bad_schema", "vLLM could not compile the form asked for; its log says why")
    message = f"vLLM ended the request with finish_reason {reason!r}"
    return Failure(opened.index, "ended_by_engine", message, transient=True)


def _logprobs(flat: Any) -> Logprobs:
    """vLLM's FlatLogprobs: at each place the sampled token, then the likeliest ones. Texts are shared."""
    starts = flat.start_indices
    tops = [range(start + 1, end) for start, end in zip(starts, flat.end_indices, strict=True)]
    top = list(chain.from_iterable(tops))
    texts = [sys.intern(text or "") for text in flat.decoded_tokens]
    return Logprobs(
        tokens=[texts[i] for i in starts],
        token_ids=array("i", [flat.token_ids[i] for i in starts]),
        logprobs=array("d", [flat.logprobs[i] for i in starts]),
        top_counts=[len(places) for places in tops],
        top_tokens=[texts[i] for i in top],
        top_token_ids=array("i", [flat.token_ids[i] for i in top]),
        top_logprobs=array("d", [flat.logprobs[i] for i in top]),
    )


def _last_words(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text if len(text) < 2000 else "… " + text[-2000:]
