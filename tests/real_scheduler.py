"""vLLM's own scheduler without a model, stepped like a simulated engine: what the simulation is compared with."""

from typing import Any

from bulkgen.engine.demo_model import prepare_demo_model
from bulkgen.feed.simulation import SimulatedLimits, SimulatedRow
from bulkgen.records import EngineStats

# Any token will do: nothing ends at it.
_OUTPUT_TOKEN = 7


class RealScheduler:
    """Takes what `SimulatedEngine` takes. Its model answers at once, with as many tokens as each row has."""

    def __init__(self, limits: SimulatedLimits) -> None:
        import torch
        from vllm import EngineArgs
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        size = limits.block_size
        config = EngineArgs(
            model=str(prepare_demo_model(print)),
            max_model_len=8192,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            block_size=size,
            enable_prefix_caching=limits.enable_prefix_caching,
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = limits.num_gpu_blocks
        spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(size, sha256)
        self._scheduler: Any = Scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(limits.num_gpu_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=size,
            log_stats=True,
        )
        self._pool = self._scheduler.kv_cache_manager.block_pool
        self.prefill: list[int] = []
        self.decoding: list[int] = []
        self.used: list[int] = []
        self.finished: list[int] = []
        self.preemptions = self.recomputed = self.hit_tokens = self.prompt_tokens = self.output_tokens = 0
        self._computed: dict[str, int] = {}  # after the last step of each, which is what preemption loses
        self._in_prompt: set[str] = set()

    @property
    def unfinished(self) -> int:
        return int(self._scheduler.get_num_unfinished_requests())

    def submit(self, index: int, row: SimulatedRow) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        shared = min(row.shared_tokens, row.prompt_tokens) if row.group >= 0 else 0
        self._scheduler.add_request(
            Request(
                request_id=str(index),
                prompt_token_ids=[1_000 + row.group] * shared + [10_000 + index] * (row.prompt_tokens - shared),
                sampling_params=SamplingParams(max_tokens=row.output_tokens, ignore_eos=True),
                pooling_params=None,
                block_hasher=self._hasher,
            )
        )

    def step(self) -> list[int]:
        from vllm.v1.outputs import ModelRunnerOutput

        output = self._scheduler.schedule()
        self.used.append(self._pool.num_gpu_blocks - 1 - self._pool.get_num_free_blocks())
        self.preemptions += len(output.preempted_req_ids or ())
        self._count(output)
        names = list(output.num_scheduled_tokens)
        requests = [self._scheduler.requests[name] for name in names]
        sampled = [[_OUTPUT_TOKEN] if r.num_computed_tokens >= r.num_tokens else [] for r in requests]
        self._in_prompt = {name for name, tokens in zip(names, sampled, strict=True) if not tokens}
        self._computed.update({r.request_id: r.num_computed_tokens for r in requests})
        answer = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, sampled_token_ids=sampled)
        ended = []
        for told in self._scheduler.update_from_output(output, answer).values():
            self.output_tokens += sum(len(one.new_token_ids) for one in told.outputs)
            ended += [int(one.request_id) for one in told.outputs if one.finish_reason is not None]
            if told.scheduler_stats is not None:
                self.hit_tokens += told.scheduler_stats.prefix_cache_stats.hits
        self.finished += ended
        return ended

    def _count(self, output: Any) -> None:
        """What of a step is prefill, and what of that was computed before."""
        new = {request.req_id: len(request.prompt_token_ids) for request in output.scheduled_new_reqs}
        resumed = set(output.scheduled_cached_reqs.resumed_req_ids)
        self.prompt_tokens += sum(new.values())
        prefill = {
            name: count
            for name, count in output.num_scheduled_tokens.items()
            if name in new or name in resumed or name in self._in_prompt
        }
        self.prefill.append(sum(prefill.values()))
        self.decoding.append(len(output.num_scheduled_tokens) - len(prefill))
        for name in resumed:
            found = self._scheduler.requests[name].num_computed_tokens - prefill[name]
            self.recomputed += max(0, self._computed[name] - found)

    def stats(self) -> EngineStats:
        running, waiting = self._scheduler.get_request_counts()
        return EngineStats(
            running,
            waiting,
            self._pool.get_usage(),
            self.preemptions,
            self.prompt_tokens,
            self.hit_tokens,
            self.output_tokens,
        )
