"""vLLM behind the engine contract: one `LLMEngine`, fed with token ids and stepped by the caller.

`LLMEngine.step` rather than `AsyncLLM`: the caller's loop is the only user and needs neither an event loop nor a task
a request; in speed they do not differ beyond noise on the CPU (`python -m bench driver`). Settings keep vLLM's names;
defaults are vLLM's own.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

from bulkgen.engine.contract import EngineSettings
from bulkgen.engine.memory import memory_cure
from bulkgen.errors import EngineError
from bulkgen.records import Completion, EngineLimits, EngineStats, Failure, Request

# What a generated answer can end with; vLLM's other reasons (abort, error) mean that there is none.
_FINISHED = ("stop", "length", "repetition")


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


class VllmEngine:
    """One vLLM engine in this process (and, where vLLM chooses so, its core and workers in children)."""

    def __init__(self, settings: EngineSettings) -> None:
        self._counters = _Counters()
        self._open: dict[str, bool] = {}  # request → whether vLLM itself makes its text
        self._refused: list[Failure] = []
        self._cancelled: set[str] = set()
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
        cache = config.cache_config
        self.limits = EngineLimits(
            max_model_len=config.model_config.max_model_len,
            # vLLM does not start unless one sequence of max_model_len fits, however its layers share the blocks.
            kv_tokens=max(cache.num_gpu_blocks or 0, -(-config.model_config.max_model_len // cache.block_size))
            * cache.block_size,
            block_size=cache.block_size,
            max_num_seqs=config.scheduler_config.max_num_seqs,
        )
        self._tokenizer = self._engine.renderer.tokenizer

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            sampling = dict(request.sampling)
            # Text is made once at the end; only stop strings need it at every token.
            stops = bool(sampling.get("stop"))
            try:
                params = SamplingParams(**sampling, output_kind=RequestOutputKind.FINAL_ONLY, detokenize=stops)
                name = str(request.index)
                self._engine.add_request(name, {"prompt_token_ids": list(request.tokens)}, params)
            except EngineDeadError as e:
                raise EngineError(f"vLLM died: {_last_words(e)}") from e
            except Exception as e:  # vLLM checks a request while it takes it, with errors of many kinds
                self._refused.append(Failure(request.index, "refused_by_engine", _last_words(e)))
                continue
            self._open[name] = stops

    def cancel(self, indices: Sequence[int]) -> None:
        names = [name for name in map(str, indices) if self._open.pop(name, None) is not None]
        self._cancelled.update(names)
        self._refused = [failure for failure in self._refused if failure.index not in set(indices)]
        try:
            self._engine.abort_request(names)
        except Exception as e:  # as in step
            raise EngineError(f"vLLM died: {_last_words(e)}") from e

    def poll(self) -> list[Completion | Failure]:
        done: list[Completion | Failure] = list(self._refused)
        self._refused.clear()
        if not self._open:
            return done
        try:
            outputs = self._engine.step()
        except Exception as e:  # vLLM raises whatever its core died of
            raise EngineError(f"vLLM died: {_last_words(e)}") from e
        for output in outputs:
            if output.finished and isinstance(output, RequestOutput) and output.request_id not in self._cancelled:
                has_text = self._open.pop(output.request_id, False)
                done.append(self._result(output, has_text))
        return done

    def _result(self, output: RequestOutput, has_text: bool) -> Completion | Failure:
        answer = output.outputs[0]
        if answer.finish_reason not in _FINISHED:
            reason = f"vLLM ended the request with finish_reason {answer.finish_reason!r}"
            return Failure(int(output.request_id), "ended_by_engine", reason, transient=True)
        metrics = output.metrics
        text = answer.text
        if not has_text:
            text = self._tokenizer.decode(list(answer.token_ids), skip_special_tokens=True)
        queued_s = ttft_s = e2e_s = 0.0
        if metrics is not None:
            queued_s = metrics.scheduled_ts - metrics.queued_ts
            ttft_s = metrics.first_token_ts - metrics.queued_ts
            e2e_s = metrics.last_token_ts - metrics.queued_ts
        tokens = len(answer.token_ids)
        return Completion(
            index=int(output.request_id),
            text=text,
            finish_reason=answer.finish_reason,
            prompt_tokens=len(output.prompt_token_ids or ()),
            cached_tokens=output.num_cached_tokens or 0,
            output_tokens=tokens,
            queued_s=queued_s,
            ttft_s=ttft_s,
            tpot_s=(e2e_s - ttft_s) / (tokens - 1) if tokens > 1 else None,
            e2e_s=e2e_s,
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
        )

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._engine.engine_core.shutdown()


def _last_words(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text if len(text) < 2000 else "… " + text[-2000:]
