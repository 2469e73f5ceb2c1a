"""What runs teach about how long steps take, and where it is kept."""

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from bulkgen import profiles
from bulkgen.profiles import cpu_speed, learn_profile, load_profile, state_folder
from bulkgen.report import StepWindow, step_windows
from bulkgen.report.timeline import load_timeline
from bulkgen.sizing import CpuSpeed

KEY = {"model": "m", "device": "CPU, 2 cores", "enforce_eager": True}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BULKGEN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def windows(number: int = 40) -> list[StepWindow]:
    """A second or so each, of steps that take 10 ms, and 1 ms a sequence, 0.1 ms a prompt token and 1 us of context."""
    made = []
    for i in range(number):
        steps, prefill, decode, context = 5 + i % 7, (i % 5) * 300, (20 + i % 11) * 5, (1 + i % 13) * 4000
        seconds = steps * 0.01 + prefill * 1e-4 + decode * 1e-3 + context * 1e-6
        made.append(
            StepWindow(
                steps=steps, prefill_tokens=prefill, decode_tokens=decode, context_tokens=context, seconds=seconds
            )
        )
    return made


def test_what_a_run_teaches_is_found_under_just_its_key() -> None:
    assert load_profile(KEY) is None
    assert learn_profile(KEY, windows()) is not None
    found = load_profile(KEY)
    assert found is not None
    assert found.windows == 40
    assert found.error < 1e-6
    assert found.steps.start_s == pytest.approx(0.01)
    assert found.steps.prefill_token_s == pytest.approx(1e-4)
    assert found.steps.decode_sequence_s == pytest.approx(1e-3)
    assert found.steps.context_token_s == pytest.approx(1e-6)
    assert load_profile({**KEY, "enforce_eager": False}) is None


def test_little_teaches_nothing_and_leaves_what_was_learned() -> None:
    assert learn_profile(KEY, windows(19)) is None
    learn_profile(KEY, windows())
    assert learn_profile(KEY, windows(3)) is None
    assert load_profile(KEY) is not None


def test_what_cannot_be_read_is_as_if_it_were_not_there(home: Path) -> None:
    learn_profile(KEY, windows())
    (file,) = (home / "profiles").iterdir()
    for text in ("", "{", "[]", '{"format": 1}', file.read_text().replace('"format": 1', '"format": 99')):
        file.write_text(text)
        assert load_profile(KEY) is None


def test_without_a_place_nothing_is_kept_and_nothing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BULKGEN_HOME", str(tmp_path / "file"))
    assert learn_profile(KEY, windows()) is None
    monkeypatch.setattr(profiles, "state_folder", lambda: None)
    assert learn_profile(KEY, windows()) is None
    assert load_profile(KEY) is None


def test_the_state_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BULKGEN_HOME", "/a")
    assert state_folder() == Path("/a")
    monkeypatch.delenv("BULKGEN_HOME")
    monkeypatch.setenv("XDG_STATE_HOME", "/b")
    assert state_folder() == Path("/b/bulkgen")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert state_folder() == Path("/c/.local/state/bulkgen")


def test_a_busy_machine_does_not_become_a_slow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for now, best in (((5, 5), (5, 5)), ((1, 9), (5, 9)), ((2, 2), (5, 9))):
        monkeypatch.setattr(profiles, "measure_cpu", lambda now=now: CpuSpeed(*now))
        assert cpu_speed() == CpuSpeed(*best)


def sample(time: float, **more: Any) -> str:
    import json

    blank = dict.fromkeys(
        ("replica", "incarnation", "waiting", "preemptions", "prompt_tokens", "cached_tokens", "output_tokens"), 0
    )
    return json.dumps(
        {"time": time, "start": 1, "running": 1, "kv_usage": 0.0, "done": 0, "failed": 0, **blank, **more}
    )


def test_windows_are_what_happened_between_two_samples_of_one_engine(tmp_path: Path) -> None:
    lines = [
        sample(1.0, steps=2, step_s=0.5, prompt_tokens=100, cached_tokens=40, output_tokens=7, kv_usage=0.2),
        sample(1.0, replica=1, steps=50, step_s=0.9),
        sample(2.0, steps=6, step_s=1.25, prompt_tokens=180, cached_tokens=60, output_tokens=17, kv_usage=0.4),
        sample(3.0, steps=6, step_s=1.25, prompt_tokens=180, cached_tokens=60, output_tokens=17, kv_usage=0.4),
        sample(4.0, incarnation=1, steps=1, step_s=0.1),
        sample(5.0),
        sample(6.0, start=2, steps=90, step_s=9.0),
    ]
    (tmp_path / "timeline.jsonl").write_text("\n".join(lines) + "\n")
    timeline: pl.DataFrame = load_timeline(tmp_path / "timeline.jsonl", {1: 0.0, 2: 5.5})
    assert step_windows(timeline, 1, {(0, 0): 1000}) == [
        StepWindow(steps=4, prefill_tokens=60, decode_tokens=10, context_tokens=1200, seconds=0.75)
    ]
