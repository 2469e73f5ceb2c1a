"""One peer over one backlog, in a process of its own: `python -m bench.peer WAY FOLDER` prints `peer {json}`.

    chat      LLM.chat over all rows, with vLLM's defaults: the short script
    chunks    LLM.chat in chunks of 64 rows: the usual script
    ceiling   the requests of bulkgen's plan, in its order, from memory straight into LLMEngine.step
    static    Transformers in static batches of 16, padded

FOLDER holds in.jsonl, settings.json (`model`, `args`) and, for the ceiling, `plan`, a plan of the same rows.
"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_CHUNK, _STATIC_BATCH = 64, 16


def main() -> None:
    """Run one way and print what it took; loading the engine is apart."""
    way, folder = sys.argv[1], Path(sys.argv[2])
    settings = json.loads((folder / "settings.json").read_text())
    rows = [json.loads(line) for line in (folder / "in.jsonl").read_text().splitlines()]
    if way == "ceiling":
        result = _ceiling(settings, folder / "plan")
    elif way == "static":
        result = _static(settings, rows)
    else:
        result = _chat(settings, rows, _CHUNK if way == "chunks" else len(rows))
    print(f"\npeer {json.dumps(result)}", flush=True)


def _chat(settings: dict[str, Any], rows: list[dict[str, Any]], chunk: int) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    began = time.monotonic()
    llm = LLM(settings["model"], disable_log_stats=False, **settings["args"])
    loaded = time.monotonic()
    steps = _count_steps(llm.llm_engine)
    tokens = 0
    for first in range(0, len(rows), chunk):
        some = rows[first : first + chunk]
        params = [SamplingParams(max_tokens=row["max_tokens"], temperature=row["temperature"]) for row in some]
        outputs = llm.chat([row["messages"] for row in some], params, use_tqdm=False)
        tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
    return _result(began, loaded, tokens, llm.llm_engine) | {"steps": len(steps)}


def _count_steps(engine: Any) -> list[None]:
    """A list that gets an entry with every step of an engine, as far as its caller sees them."""
    steps: list[None] = []
    step = engine.step

    def counted() -> Any:
        steps.append(None)
        return step()

    engine.step = counted
    return steps


def _ceiling(settings: dict[str, Any], plan: Path) -> dict[str, Any]:
    from vllm import EngineArgs, LLMEngine, SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.usage.usage_lib import UsageContext

    began = time.monotonic()
    args = EngineArgs(model=settings["model"], disable_log_stats=False, **settings["args"])
    engine = LLMEngine.from_engine_args(args, usage_context=UsageContext.LLM_CLASS)
    requests = [
        (
            str(i),
            {"prompt_token_ids": tokens},
            SamplingParams(
                max_tokens=budget, temperature=0.0, output_kind=RequestOutputKind.FINAL_ONLY, detokenize=False
            ),
        )
        for i, (tokens, budget) in enumerate(_planned(plan))
    ]
    loaded = time.monotonic()
    for name, prompt, params in requests:
        engine.add_request(name, prompt, params)
    tokens = steps = 0
    while engine.has_unfinished_requests():
        tokens += sum(len(output.outputs[0].token_ids) for output in engine.step() if output.finished)
        steps += 1
    return _result(began, loaded, tokens, engine) | {"steps": steps}


def _planned(folder: Path) -> Iterator[tuple[list[int], int]]:
    from bulkgen.plan import load_plan

    plan = load_plan(folder)
    for shard in plan.shards:
        ordinals = plan.ordinals(shard)
        # Of rows with the same request bulkgen sends one.
        for row in plan.read(shard, set(ordinals[plan.sent[ordinals]].tolist())):
            yield row.tokens.tolist(), row.max_tokens


def _static(settings: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    began = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(settings["model"], padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    dtype = settings["args"].get("dtype", "auto")
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype)
    loaded = time.monotonic()
    tokens = 0
    with torch.inference_mode():
        for first in range(0, len(rows), _STATIC_BATCH):
            some = rows[first : first + _STATIC_BATCH]
            texts = [
                tokenizer.apply_chat_template(r["messages"], add_generation_prompt=True, tokenize=False) for r in some
            ]
            inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
            longest = max(row["max_tokens"] for row in some)
            made = model.generate(
                **inputs, max_new_tokens=longest, do_sample=False, pad_token_id=tokenizer.pad_token_id
            )
            new = made[:, inputs["input_ids"].shape[1] :]
            # What a row was asked for counts, not what the batch computed for it.
            counts = (new != tokenizer.pad_token_id).sum(dim=1).tolist()
            tokens += sum(min(n, row["max_tokens"]) for n, row in zip(counts, some, strict=True))
    return _result(began, loaded, tokens, None)


def _result(began: float, loaded: float, tokens: int, engine: Any) -> dict[str, Any]:
    ended = time.monotonic()
    metrics = {} if engine is None else {m.name: getattr(m, "value", None) for m in engine.get_metrics()}
    return {
        "load_s": loaded - began,
        "run_s": ended - loaded,
        "output_tokens": tokens,
        "hit_tokens": metrics.get("vllm:prefix_cache_hits"),
        "preemptions": metrics.get("vllm:num_preemptions"),
    }


if __name__ == "__main__":
    main()
