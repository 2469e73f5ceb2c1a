"""`bulkgen tune`: candidates, samples and halving by themselves, and the command on the stub engine."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from bulkgen.errors import EngineError, SpecError
from bulkgen.profiles import Tuned, WorkShape, keep_tuned, load_tuned, nearest
from bulkgen.sizing import Demand, Measured, Place, Setting, chosen_env, resolve
from bulkgen.tune.candidates import RESOLVED, Candidate, Ground, pinned_names, propose, together
from bulkgen.tune.halving import Findings, Halving, TimeOver
from bulkgen.tune.rounds import Rounds, Trial
from bulkgen.tune.sample import stratified
from tests.harness import Ended, Job, bulkgen, default_signals, model_folder, prompts
from tests.sizing_models import LLAMA_31_8B
from tests.test_engine_settings import CPU

MakeJob = Callable[..., Job]
GROUND = Ground(device="cpu", sequences=1000, running=256, prompt_tokens=1_000_000, small_blocks=True)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BULKGEN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


# ---- candidates ----


def resolved(**given: Any) -> tuple[Setting, ...]:
    return resolve(given, Demand(longest=1000, sequences=1000), Place(device=CPU, small_blocks=True), 8192)


def names(candidates: list[Candidate]) -> set[str]:
    return {name for candidate in candidates for name in candidate.values}


def test_what_matters_here_is_tried_one_setting_at_a_time() -> None:
    found = propose(resolved(), (), GROUND, ())
    assert names(found) == {"enforce_eager", "max_num_batched_tokens", "max_num_seqs", "block_size"}
    assert all(len(candidate.changes) == 1 for candidate in found)
    values = {setting.name: setting.value for setting in resolved()}
    assert all(value != values[name] for candidate in found for name, value in candidate.changes)
    assert {c.values["max_num_seqs"] for c in found if "max_num_seqs" in c.values} == {512, 128, 64}


def test_what_the_user_set_is_never_varied() -> None:
    given = {"max_num_seqs": 100, "block_size": 64}
    found = propose(resolved(**given), given, GROUND, ("kv_cache_dtype",))
    assert not names(found) & given.keys()
    assert pinned_names(resolved(**given), given, GROUND) == ["block_size", "max_num_seqs"]
    assert propose(resolved(), ("kv_cache_dtype",), GROUND, ("kv_cache_dtype",)) == propose(resolved(), (), GROUND, ())


def test_what_changes_answers_is_tried_only_where_it_was_allowed() -> None:
    assert not names(propose(resolved(), (), GROUND, ())) & {"kv_cache_dtype", "quantization", "dtype"}
    (fp8,) = [c for c in propose(resolved(), (), GROUND, ("kv_cache_dtype",)) if c.answers_change]
    assert fp8.values == {"kv_cache_dtype": "fp8"}


def test_more_sequences_are_tried_only_where_nothing_else_bounds_them() -> None:
    held = Ground(device="cpu", sequences=1000, running=40, prompt_tokens=1_000_000, small_blocks=False)
    found = [c.values["max_num_seqs"] for c in propose(resolved(), (), held, ()) if "max_num_seqs" in c.values]
    assert found == [20, 10]
    assert "block_size" not in names(propose(resolved(), (), held, ()))


def test_threads_are_tried_where_cores_are_shared() -> None:
    smt = Ground(device="cpu", sequences=9, running=9, prompt_tokens=9, small_blocks=False, cores=8, physical_cores=4)
    found = [c.values["OMP_NUM_THREADS"] for c in propose(resolved(), (), smt, ()) if "OMP_NUM_THREADS" in c.values]
    assert found == [7, 4]
    assert "OMP_NUM_THREADS" not in names(propose(resolved(), ("OMP_NUM_THREADS",), smt, ()))


def test_what_was_faster_by_itself_goes_together() -> None:
    a, b, c = (Candidate(((name, value),)) for name, value in (("a", 1), ("a", 2), ("b", 3)))
    both = together([a, b, c])
    assert both is not None
    assert both.values == {"a": 1, "b": 3}
    assert together([a, b]) is None


# ---- samples ----


def test_a_sample_is_like_the_data_set_and_the_same_each_time() -> None:
    random = np.random.default_rng(7)
    prompt = np.concatenate([random.integers(10, 50, 900), random.integers(1000, 2000, 100)])
    budget = random.choice([16, 256], 1000)
    order = stratified(prompt, budget, 0)
    assert sorted(order) == list(range(1000))
    assert (order == stratified(prompt, budget, 0)).all()
    assert (order != stratified(prompt, budget, 1)).any()
    for size in (50, 200):
        part = order[:size]
        assert abs((prompt[part] >= 1000).mean() - 0.1) < 0.03
        assert abs((budget[part] == 256).mean() - (budget == 256).mean()) < 0.05


def test_a_sample_of_nothing_or_of_equal_rows() -> None:
    assert len(stratified([], [], 0)) == 0
    assert sorted(stratified([5] * 9, [3] * 9, 0)) == list(range(9))


# ---- halving ----


class Bench:
    """Engines that take what they are told, by a clock that only they move."""

    def __init__(self, speeds: Mapping[str, float], start_s: float = 1.0, noise: float = 0.0) -> None:
        self.speeds = speeds
        self.start_s = start_s
        self.noise = noise
        self.now = 0.0
        self.until = 0.0
        self.trials: list[tuple[str, int]] = []

    def measure(self, candidate: Candidate, rows: int) -> Trial:
        speed = self.speeds.get(candidate.name, 1.0)
        if speed == 0.0:
            return Trial(candidate=candidate, rows=rows, fault="could not start")
        self.trials.append((candidate.name, rows))
        wave = 1 + self.noise * (1, -1, -1, 1)[len(self.trials) % 4]
        generate_s = wave * rows / 100 / speed
        start_s = self.start_s + (10.0 if candidate.values.get("enforce_eager") is False else 0.0)
        self.now += start_s + generate_s
        if self.now > self.until:
            self.now = self.until
            raise TimeOver
        return Trial(
            candidate=candidate,
            rows=rows,
            took_s=start_s + generate_s,
            start_s=start_s,
            generate_s=generate_s,
            tokens=10 * rows,
        )

    def search(self, *candidates: Candidate, budget_s: float = 1000.0, job_rows: int = 10_000) -> Findings:
        self.until = budget_s
        return Halving(
            candidates,
            self.measure,
            clock=lambda: self.now,
            until=budget_s,
            job_rows=job_rows,
            most_rows=1000,
            first_rows=100,
        ).run()


def one(name: str, value: Any = 1, **more: Any) -> Candidate:
    return Candidate(((name, value),), **more)


def test_the_fastest_is_found_and_samples_grow() -> None:
    bench = Bench({"a 1": 1.05, "b 1": 1.3, "c 1": 0.8, "d 1": 0.9})
    found = bench.search(one("a"), one("b"), one("c"), one("d"))
    assert found.best is not None
    assert {"b 1", "a 1, b 1", "b 1, a 1"} >= {found.best.candidate.name}
    assert found.ended == "decided"
    sizes = [trials[0].rows for trials in found.rounds if trials]
    assert sizes == sorted(sizes)
    assert found.margin == 0.02
    for trials in found.rounds[1:]:
        assert [trial.candidate for trial in trials].count(RESOLVED) == 2
        assert len({trial.rows for trial in trials}) == 1


def test_what_is_faster_by_itself_is_tried_together() -> None:
    bench = Bench({"a 1": 1.2, "b 1": 1.3, "b 1, a 1": 1.5})
    found = bench.search(one("a"), one("b"))
    assert found.best is not None
    assert found.best.candidate.values == {"a": 1, "b": 1}
    assert found.best.gain == pytest.approx(0.5)


def test_nothing_is_better_than_noise() -> None:
    found = Bench({"a 1": 1.05, "b 1": 0.97}, noise=0.04).search(one("a"), one("b"))
    assert found.best is None
    assert found.conclusive
    assert found.margin is not None
    assert found.margin > 0.05
    slower = Bench({"a 1": 0.5, "b 1": 0.9}).search(one("a"), one("b"))
    assert (slower.best, slower.ended) == (None, "none faster")


def test_equal_ones_end_it_after_a_round() -> None:
    bench = Bench({"a 1": 1.001, "b 1": 1.002})
    found = bench.search(one("a"), one("b"))
    assert (found.best, found.ended) == (None, "noise")
    assert len([trials for trials in found.rounds if len(trials) > 1]) == 1


@pytest.mark.parametrize("budget_s", [3.0, 8.0, 13.0, 30.0, 60.0, 200.0])
def test_the_time_is_never_exceeded_and_what_was_not_tried_is_said(budget_s: float) -> None:
    candidates = [one(name) for name in "abcdefgh"]
    bench = Bench({"a 1": 1.2, "b 1": 0.2}, start_s=2.0)
    found = bench.search(*candidates, budget_s=budget_s)
    assert bench.now <= budget_s
    tried = {c.name for c in found.tried}
    assert {c.name for c, _ in found.not_tried} == {c.name for c in candidates} - tried
    assert found.conclusive == (budget_s > 8)
    if budget_s <= 8:
        assert found.best is None


def test_one_that_runs_when_the_time_is_over_is_named() -> None:
    found = Bench({"b 1": 0.01}).search(one("a"), one("b"), budget_s=60.0)
    assert [(c.name, why) for c, why in found.not_tried] == [("b 1", "was stopped when the time was over")]
    assert found.ended == "time"


def test_what_starts_longer_has_to_gain_it() -> None:
    compiled = one("enforce_eager", False, extra_start_s=10.0)
    speeds = {"enforce_eager False": 1.2}
    assert (found := Bench(speeds).search(compiled)).best is not None
    assert found.best.gain == pytest.approx(100 / (100 / 1.2 + 10) - 1)
    short = Bench(speeds).search(compiled, job_rows=3000)
    assert short.best is None
    hopeless = Bench(speeds).search(compiled, one("a"), job_rows=1000)
    assert "starts longer than it could gain" in {c.name: why for c, why in hopeless.not_tried}[compiled.name]
    alone = Bench(speeds).search(compiled, job_rows=1000)
    assert (alone.ended, [c for c, _ in alone.not_tried]) == ("nothing to try", [compiled])


def test_what_cannot_start_is_out_and_the_rest_goes_on() -> None:
    found = Bench({"a 1": 0.0, "b 1": 1.3}).search(one("a"), one("b"))
    assert found.best is not None
    assert found.best.candidate.name == "b 1"
    with pytest.raises(EngineError, match="the resolved settings cannot be measured: could not start"):
        Bench({"resolved settings": 0.0}).search(one("a"))


def test_what_fails_on_a_larger_sample_is_not_the_best() -> None:
    class Dying(Bench):
        def measure(self, candidate: Candidate, rows: int) -> Trial:
            if any(name == candidate.name == "a 1" for name, _ in self.trials):
                return Trial(candidate=candidate, rows=rows, fault="died")
            return super().measure(candidate, rows)

    assert Dying({"a 1": 1.5, "b 1": 0.9}).search(one("a"), one("b")).best is None


@pytest.mark.parametrize("budget_s", range(10, 120, 2))
def test_a_round_that_was_not_finished_does_not_hide_the_fastest(budget_s: int) -> None:
    bench = Bench({"a 1": 1.3, "b 1": 1.2, "a 1, b 1": 1.05, "c 1": 0.9}, start_s=2.0)
    best = bench.search(one("a"), one("b"), one("c"), budget_s=budget_s).best
    tried_a = any(name == "a 1" for name, _ in bench.trials)
    assert best is None or best.candidate.name == ("a 1" if tried_a else "b 1")


def test_what_changes_answers_is_never_the_best() -> None:
    fp8 = one("kv_cache_dtype", "fp8", answers_change=True)
    found = Bench({"kv_cache_dtype fp8": 2.0, "a 1": 1.1}).search(one("a"), fp8)
    assert found.best is not None
    assert found.best.candidate.name == "a 1"
    assert [(s.candidate, round(s.gain, 2)) for s in found.aside] == [(fp8, 1.0)]
    alone = Bench({"kv_cache_dtype fp8": 2.0}).search(fp8)
    assert (alone.best, len(alone.aside)) == (None, 1)


def test_rows_that_fail_only_with_a_candidate_put_it_out() -> None:
    trials = [
        Trial(candidate=RESOLVED, rows=10, generate_s=1.0, tokens=100),
        Trial(candidate=one("a"), rows=10, generate_s=0.5, tokens=100, failed=1),
        Trial(candidate=one("b"), rows=10, generate_s=0.8, tokens=100),
    ]
    assert [s.candidate.name for s in Rounds(10, [trials]).standings(0)] == ["b 1"]


# ---- what is kept ----


def tuned(sequences: int = 1000, **more: Any) -> Tuned:
    shape = WorkShape(prompt_tokens=100.0, prefill_tokens=50.0, output_tokens=20.0, sequences=sequences)
    about: dict[str, Any] = {"values": {"max_num_seqs": 512}, "instead_of": {"max_num_seqs": 256}, "confirmed": {}}
    about |= {"tried": ["block_size"], "gain": 0.12, "margin": 0.02, "rows": 500, "measured_at": 1.8e9}
    return Tuned(shape=shape, **(about | more))


def test_what_was_found_is_for_shapes_like_it() -> None:
    key = {"model": "m"}
    assert load_tuned(key) == []
    assert keep_tuned(key, tuned(1000))
    assert keep_tuned(key, tuned(100_000, values={"max_num_seqs": 2048}))
    assert keep_tuned(key, tuned(1100, gain=0.5))
    found = load_tuned(key)
    assert [entry.shape.sequences for entry in found] == [100_000, 1100]
    near = nearest(found, tuned(1900).shape)
    assert near is not None
    assert near.gain == 0.5
    assert nearest(found, tuned(10_000).shape) is None
    assert load_tuned({"model": "n"}) == []


def test_settings_name_what_was_measured_and_the_users_own_wins() -> None:
    found = tuned(values={"max_num_seqs": 512, "OMP_NUM_THREADS": 1}, instead_of={"max_num_seqs": 256}).measured()
    demand, place = Demand(longest=1000, sequences=1000), Place(device=CPU)
    settings = {s.name: s for s in resolve({}, demand, place, 8192, found)}
    assert (settings["max_num_seqs"].value, settings["max_num_seqs"].source) == (512, "measured")
    assert "12% faster than max_num_seqs 256" in settings["max_num_seqs"].reason
    assert settings["block_size"].source == "default"
    assert "nothing else was faster by more than 2%" in settings["block_size"].reason
    assert chosen_env(tuple(settings.values())) == {"OMP_NUM_THREADS": "1"}
    own = {s.name: s for s in resolve({"max_num_seqs": 7}, demand, place, 8192, found)}
    assert (own["max_num_seqs"].value, own["max_num_seqs"].source) == (7, "user")
    assert resolve({}, demand, place, 8192, Measured()) == resolve({}, demand, place, 8192)


# ---- the command, on the stub ----

# More sequences at once are all that makes the stub faster: a step takes as long with many as with few.
SLOW = {"step_s": 0.01}


def stub_job(make_job: MakeJob, rows: int = 64, **engine: Any) -> Job:
    """A job on the stub with a config, of which `bulkgen plan` can tell settings; half of the sequences at once."""
    job = make_job(
        prompts(rows),
        model="tiny",
        input={"chat": False},
        sampling={"max_tokens": 8},
        engine={"stub": SLOW, "max_model_len": 512, **engine},
    )
    folder = model_folder(job.folder / "tiny", None)
    (folder / "config.json").write_text(json.dumps(LLAMA_31_8B))
    return job


def tune(job: Job, *options: str, env: Mapping[str, str] | None = None) -> Ended:
    return bulkgen("tune", str(job.path), *options, env=env)


def found_by(job: Job, *options: str, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    ended = tune(job, "--json", *options, env=env)
    assert ended.code == 0, ended.err
    found: dict[str, Any] = json.loads(ended.out)
    return found


def keep_instead(values: dict[str, Any], home: Path) -> None:
    """In place of what was measured here, what a faster machine had found: no test goes by the clock."""
    (file,) = (f for f in (home / "profiles").iterdir() if "best settings" in f.read_text())
    kept = json.loads(file.read_text())
    kept["tuned"][0] |= {
        "values": values,
        "instead_of": {"max_num_seqs": 64},
        "gain": 0.25,
        "tried": [],
        "confirmed": {},
    }
    file.write_text(json.dumps(kept))


def test_tuning_leaves_no_trace_and_is_kept_for_runs_and_plans(make_job: MakeJob, tmp_path: Path, home: Path) -> None:
    job = stub_job(make_job, enforce_eager=True, block_size=32, max_num_batched_tokens=4096)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    before = sorted(job.folder.rglob("*"))
    found = found_by(job, "--budget", "2m", env={"TMPDIR": str(temporary)})
    assert sorted(job.folder.rglob("*")) == before
    assert list(temporary.iterdir()) == []
    assert found["kept"]
    trials = [trial for trials in found["rounds"] for trial in trials]
    assert any(trial["settings"] == {"max_num_seqs": 32} for trial in trials)
    assert {len({trial["rows"] for trial in trials}) for trials in found["rounds"]} == {1}
    assert all(trial["failed"] == 0 and trial["fault"] is None for trial in trials)

    keep_instead({"max_num_seqs": 48}, home)
    page = json.loads(bulkgen("plan", str(job.path), "--json").out)
    (setting,) = [s for s in page["devices"][0]["settings"] if s["name"] == "max_num_seqs"]
    assert (setting["value"], setting["source"]) == (48, "measured")
    assert "bulkgen tune on 20" in setting["reason"]
    assert "25% faster than max_num_seqs 64" in setting["reason"]

    assert job.run().code == 0
    told = yaml.safe_load((job.run_folder / "job.yaml").read_text())["chosen"]
    assert told["settings"] == [{"max_num_seqs": 48, "source": "measured", "reason": setting["reason"]}]
    (ready,) = job.manifest("ready")
    assert ready["max_num_seqs"] == 48

    # What the job says itself wins, and what was measured with other settings of its own says nothing.
    own = json.loads(bulkgen("plan", str(job.path), "--json", "--set", "engine.max_num_seqs=9").out)
    (setting,) = [s for s in own["devices"][0]["settings"] if s["name"] == "max_num_seqs"]
    assert (setting["value"], setting["source"]) == (9, "user")


def test_the_page_says_what_was_tried_and_what_was_not(make_job: MakeJob) -> None:
    job = stub_job(make_job, max_num_seqs=32, enforce_eager=True, block_size=32)
    ended = tune(job, "--budget", "60s", env={"COLUMNS": "200"})
    assert ended.code == 0, ended.err
    assert "resolved settings" in ended.out
    assert "block_size, enforce_eager, max_num_seqs: never varied" in ended.out
    assert "max_num_seqs 16" not in ended.out + ended.err


def test_nothing_left_open_is_said_at_once(make_job: MakeJob, home: Path) -> None:
    pinned = {"max_num_seqs": 32, "enforce_eager": True, "block_size": 32, "max_num_batched_tokens": 4096}
    found = found_by(stub_job(make_job, **pinned))
    assert "leaves nothing open" in found["verdict"]
    assert (found["rounds"], found["kept"]) == ([], False)
    assert set(found["set_by_the_job"]) <= {*pinned}


def test_a_budget_that_is_too_little_says_so(make_job: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    slow = stub_job(make_job, stub={"start_s": 30})
    ended = tune(slow, "--budget", "4s", env={"TMPDIR": str(tmp_path / "tmp")})
    assert ended.code == 2
    assert "--budget: 4 s are too little to compare anything" in ended.err
    assert list((tmp_path / "tmp").iterdir()) == []
    assert tune(slow, "--budget", "soon").code == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--allow", "dtype"], "no such setting; there are: kv_cache_dtype, quantization"),
        (["--allow", "kv_cache_dtype", "--set", "engine.kv_cache_dtype=fp8"], "the job sets it"),
    ],
)
def test_what_cannot_be_allowed(make_job: MakeJob, options: list[str], words: str) -> None:
    ended = tune(stub_job(make_job), *options)
    assert ended.code == 2
    assert words in ended.err


def test_engines_that_cannot_start_end_it(make_job: MakeJob) -> None:
    ended = tune(stub_job(make_job, stub={"die_on_start": 1}))
    assert ended.code == 4
    assert "the resolved settings cannot be measured" in ended.err
    assert "told to die at start 0" in ended.err
    assert "engine-0.log" not in ended.err


@pytest.mark.parametrize("when", ["planning", "trial"])
def test_a_signal_ends_it_and_leaves_nothing(make_job: MakeJob, tmp_path: Path, when: str) -> None:
    job = stub_job(make_job, rows=64 if when == "trial" else 60_000, stub={"step_s": 5.0})
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "bulkgen", "tune", str(job.path)],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=default_signals,
    )
    until = "bulkgen-tune-*/*/engine-0.log" if when == "trial" else "bulkgen-tune-*/*"
    while not list(temporary.glob(until)):
        assert process.poll() is None
        time.sleep(0.01)
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert list(temporary.iterdir()) == []
    assert [path.name for path in job.folder.iterdir() if path.name.startswith("out")] == []


def test_a_wrong_duration_names_its_option() -> None:
    from bulkgen.stopping import duration_s

    assert duration_s("--budget", "1m30s") == 90
    with pytest.raises(SpecError, match="--budget 0s: must be more than nothing"):
        duration_s("--budget", "0s")
