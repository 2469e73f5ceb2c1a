"""vLLM driven by hand, for bench/driver.py: `direct.py engine|async IN.jsonl` prints `seconds N`."""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from bench.driver import ARGS
from bulkgen.engine.demo_model import demo_model_folder
from bulkgen.engine.devices import divide

Requests = list[tuple[str, dict[str, Any], Any]]


def main() -> None:
    """Time one way of driving, from the first request offered to the last completion."""
    way, path = sys.argv[1:]
    model = str(demo_model_folder())
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    requests: Requests = []
    for i, line in enumerate(Path(path).read_text().splitlines()):
        row = json.loads(line)
        messages = [{"role": "user", "content": row["prompt"]}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        params = SamplingParams(
            temperature=0,
            max_tokens=row["max_tokens"],
            output_kind=RequestOutputKind.FINAL_ONLY,
            detokenize=False,
        )
        requests.append((str(i), {"prompt_token_ids": ids}, params))
    seconds = _engine(model, requests) if way == "engine" else asyncio.run(_async(model, requests))
    print(f"\nseconds {seconds}", flush=True)


def _engine(model: str, requests: Requests) -> float:
    args: Any = {**ARGS, **divide(1, {})[0].args}
    engine = LLMEngine.from_engine_args(
        EngineArgs(model=model, disable_log_stats=False, **args), usage_context=UsageContext.LLM_CLASS
    )
    began = time.monotonic()
    for request in requests:
        engine.add_request(*request)
    while engine.has_unfinished_requests():
        engine.step()
    return time.monotonic() - began


async def _async(model: str, requests: Requests) -> float:
    args: Any = {**ARGS, **divide(1, {})[0].args}
    args.pop("distributed_executor_backend", None)
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(model=model, disable_log_stats=False, **args), usage_context=UsageContext.LLM_CLASS
    )

    async def one(name: str, prompt: dict[str, Any], params: Any) -> None:
        async for _ in engine.generate(prompt, params, name):
            pass

    began = time.monotonic()
    await asyncio.gather(*(one(*request) for request in requests))
    seconds = time.monotonic() - began
    engine.shutdown()
    return seconds


if __name__ == "__main__":
    main()
