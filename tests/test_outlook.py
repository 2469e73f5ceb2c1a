"""`bulkgen plan`: what is said of a job before any engine, from the command line."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from bulkgen.engine_setup import fit_engine, machine_shares, replica_setups
from bulkgen.plan import load_plan
from bulkgen.preparation import open_job_model
from bulkgen.spec import load_spec
from tests.harness import Job, bulkgen, default_signals, model_folder, prompts
from tests.sizing_models import LLAMA_31_8B

MakeJob = Callable[..., Job]


def outlook(job: Job, *options: str) -> dict[str, Any]:
    ended = bulkgen("plan", str(job.path), "--json", *options)
    assert ended.code == 0, ended.err
    found: dict[str, Any] = json.loads(ended.out)
    return found


def demo_job(make_job: MakeJob, rows: list[dict[str, Any]], **sections: Any) -> Job:
    return make_job(rows, model="demo", sampling={"temperature": 0, "max_tokens": 8}, **sections)


@pytest.mark.real
def test_the_page_of_a_real_model(make_job: MakeJob) -> None:
    begin = "This is how all of these prompts begin. " * 20
    rows = [{"id": i, "prompt": f"{begin}{i % 30}"} for i in range(40)]
    job = demo_job(make_job, rows, price={"usd_per_hour": 3.6})
    found = outlook(job, "--device", "h100,cpu")
    assert (found["rows"], found["sent"], found["refused"]) == (40, 30, 0)
    assert found["shape"] == "long in, short out"
    assert found["repeats"]["decided_rows"] == 10
    assert found["groups"][0]["rows"] == 30
    assert found["groups"][0]["tokens"] > 100
    gpu, cpu = found["devices"]
    assert (gpu["device"], gpu["block_size"], gpu["bound"]) == ("h100", 16, "rows")
    assert gpu["kv_bytes_per_token"] == 2 * 30 * 3 * 64 * 2
    assert cpu["device"].startswith("CPU, ")
    for device in found["devices"]:
        time, cost = device["generate_s"], device["cost_usd"]
        assert 0 < device["limit_s"] < time["low"] < time["expected"] < time["high"]
        assert cost["expected"] == pytest.approx(time["expected"] * 0.001)
    # Nothing was made where the output will be.
    assert {path.name for path in job.folder.iterdir()} == {"job.yaml", "in.jsonl"}
    page = bulkgen("plan", str(job.path), "--device", "h100,l4").out
    assert all(word in page for word in ("Engine settings on l4", "Rows by length", "30 rows begin with", "$"))


def test_the_page_without_a_model(make_job: MakeJob) -> None:
    job = make_job(prompts(20))
    found = outlook(job)
    assert found["rows"] == 20
    assert found["devices"] == []
    assert "nothing is known of its KV cache" in found["unknown"]
    assert "Shape of the workload" in bulkgen("plan", str(job.path)).out


def test_rows_that_would_be_refused_are_counted(make_job: MakeJob) -> None:
    job = make_job([*prompts(5), {"id": "x", "prompt": None}])
    assert (outlook(job)["rows"], outlook(job)["refused"]) == (5, 1)


def test_nothing_at_all(make_job: MakeJob) -> None:
    job = make_job([])
    assert bulkgen("plan", str(job.path)).code == 6
    assert outlook(job, "--set", "input.allow_empty=true")["rows"] == 0
    assert bulkgen("plan", str(job.path), "--set", "input.allow_empty=true").code == 0


def test_expected_output_counts_where_it_is_said(make_job: MakeJob) -> None:
    job = make_job(prompts(10))
    assert outlook(job)["expected_tokens"] is None
    assert outlook(job, "--expected-output", "3")["expected_tokens"] == 30
    assert outlook(job, "--expected-output", "300")["expected_tokens"] == 80


def test_a_device_that_nobody_knows(make_job: MakeJob) -> None:
    job = make_job(prompts(2))
    ended = bulkgen("plan", str(job.path), "--device", "h1000")
    assert ended.code == 2
    assert "no such device is known; the nearest is h100" in ended.err


def test_a_model_that_the_arithmetic_does_not_know(make_job: MakeJob) -> None:
    job = make_job(prompts(2), model="odd", input={"chat": False}, engine={"max_model_len": 64})
    model_folder(job.folder / "odd", None)
    found = outlook(job)
    assert found["devices"] == []
    assert "nothing is known of KV cache, time and cost: " in found["unknown"]


def test_a_running_job_can_be_planned(make_job: MakeJob) -> None:
    job = make_job(prompts(2000), engine={"stub": {"step_s": 0.05}, "max_num_seqs": 2})
    process = job.start()
    try:
        while not (job.run_folder / "progress.json").exists():
            assert process.poll() is None
        assert outlook(job)["rows"] == 2000
    finally:
        process.kill()
        process.communicate()


def test_engines_get_what_the_page_says(make_job: MakeJob) -> None:
    job = make_job(prompts(20), model="tiny", input={"chat": False})
    folder = model_folder(job.folder / "tiny", None)
    (folder / "config.json").write_text(json.dumps(LLAMA_31_8B))
    assert job.run().code == 0
    told = yaml.safe_load((job.run_folder / "job.yaml").read_text())["chosen"]
    assert told["settings"] == []
    spec = load_spec(job.path, ["engine.kind=vllm", "engine.max_num_seqs=5", "engine.env.VLLM_CPU_KVCACHE_SPACE=3"])
    model = open_job_model(spec, print)
    settings = fit_engine(spec, model, load_plan(job.run_folder / "plan")).settings
    (setup,) = replica_setups(spec, machine_shares(spec), settings, model, 8192)
    shown = outlook(job, "--device", "cpu", "--set", "engine.max_num_seqs=5")["devices"][0]["settings"]
    page = {s["name"]: s["value"] for s in shown}
    args = setup.settings.args
    assert args["max_num_seqs"] == page["max_num_seqs"] == 5
    assert args["max_model_len"] == page["max_model_len"] < 256
    assert setup.env["VLLM_CPU_KVCACHE_SPACE"] == "3"


def model_job(make_job: MakeJob, config: dict[str, Any], **sections: Any) -> Job:
    job = make_job(prompts(20), model="tiny", input={"chat": False}, **sections)
    (model_folder(job.folder / "tiny", None) / "config.json").write_text(json.dumps(config))
    return job


def test_what_this_machine_cannot_hold_is_said(make_job: MakeJob) -> None:
    job = model_job(make_job, LLAMA_31_8B, engine={"replicas": 999, "kind": "vllm"})
    (device,) = outlook(job)["devices"]
    assert "999 replicas need a core each" in device["fault"]
    page = bulkgen("plan", str(job.path)).out
    assert "(does not start)" in page


def test_one_device_that_cannot_be_worked_out_costs_only_itself(make_job: MakeJob) -> None:
    job = model_job(make_job, LLAMA_31_8B, engine={"dtype": "bfloat16"})
    found = outlook(job, "--device", "h100,t4")
    assert [device["device"] for device in found["devices"]] == ["h100"]
    assert "t4: nothing is known" in found["unknown"]


@pytest.mark.parametrize(
    "odd",
    [
        {"rope_scaling": {"rope_type": "linear", "factor": "4"}},
        {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"a": 3}}},
        {"num_hidden_layers": "many"},
        {"hidden_size": None},
    ],
)
def test_an_odd_config_costs_the_arithmetic_and_no_more(make_job: MakeJob, odd: dict[str, Any]) -> None:
    job = model_job(make_job, {**LLAMA_31_8B, **odd}, engine={"max_model_len": 512})
    found = outlook(job, "--device", "h100")
    assert found["rows"] == 20
    assert found["devices"] == [] or found["devices"][0]["kv_tokens"] > 0
    spec = load_spec(job.path, ["engine.kind=vllm"])
    assert job.run().code == 0
    plan = load_plan(job.run_folder / "plan")
    fitted = fit_engine(spec, open_job_model(spec, print), plan)
    assert fitted.settings
    assert (fitted.serving is None) == ("nothing is known of this model's KV cache" in fitted.note)


def test_a_variable_of_the_user_wins(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    job = model_job(make_job, LLAMA_31_8B)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    (device,) = outlook(job, "--device", "cpu")["devices"]
    (space,) = [s for s in device["settings"] if s["name"] == "VLLM_CPU_KVCACHE_SPACE"]
    assert (space["value"], space["source"]) == (7, "user")
    wrong = ("--set", "engine.kind=vllm", "--set", "engine.env.VLLM_CPU_KVCACHE_SPACE=1.5")
    for command in ("plan", "run"):
        ended = bulkgen(command, str(job.path), *wrong)
        assert ended.code == 2
        assert "VLLM_CPU_KVCACHE_SPACE: must be a number of whole GiB, 1 or more, not '1.5'" in ended.err


def test_a_signal_leaves_no_rendered_prompts_behind(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(prompts(60_000))
    (tmp_path / "tmp").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "bulkgen", "plan", str(job.path)],
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=default_signals,
    )
    while not list((tmp_path / "tmp").glob("bulkgen-plan-*/*")):
        assert process.poll() is None
        time.sleep(0.01)
    process.terminate()
    assert process.wait(30) == 75
    assert list((tmp_path / "tmp").glob("bulkgen-plan-*")) == []
