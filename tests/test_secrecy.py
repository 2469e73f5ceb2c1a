"""What others must not see or feel: secrets in what a run writes and says, and rows that would drive a terminal."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bulkgen import secrecy
from bulkgen.rundir import Manifest, RunDir, RunLog, read_manifest
from bulkgen.secrecy import HIDDEN, is_secret, keep_secret
from tests.harness import HOOK, Ended, Job, bulkgen

MakeJob = Callable[..., Job]

TOKEN, PASSWORD = "hf_entirely-secret", "pass-of-proxy"
SECRETS = {"HF_TOKEN": TOKEN, "HTTPS_PROXY": f"http://user:{PASSWORD}@proxy:3128"}
ROWS = [{"id": f"r{i}", "prompt": f"row {i}"} for i in range(4)]


@pytest.fixture
def known() -> Iterator[None]:
    """Secrets that a test makes known are forgotten after it."""
    before = list(secrecy._values)
    yield
    secrecy._values[:] = before


def told(job: Job, when: str) -> Ended:
    """A run whose engine puts secrets into what it says of a row, or of its own end."""
    return job.run(env={**SECRETS, "BULKGEN_TEST_TELL": when, "PYTHONPATH": str(HOOK)})


def assert_kept(job: Job, *ended: Ended) -> None:
    for one in ended:
        assert not any(secret in one.out + one.err for secret in (TOKEN, PASSWORD)), one
    for path in job.folder.rglob("*"):
        if path.is_file() and path != job.path:
            held = path.read_bytes()
            assert TOKEN.encode() not in held, path
            assert PASSWORD.encode() not in held, path


def looks(job: Job) -> list[Ended]:
    """All that a user may look at after a run."""
    output = str(job.output)
    return [
        *(bulkgen(look, output) for look in ("status", "report", "failures")),
        *(bulkgen(look, output, "--json") for look in ("status", "report", "failures")),
        bulkgen("failures", output, "--export", str(job.folder / "bad.jsonl")),
    ]


def test_what_an_engine_says_of_a_row(make_job: MakeJob) -> None:
    job = make_job(ROWS)
    ended = told(job, "row")
    assert ended.code == 3
    assert_kept(job, ended, *looks(job))


def test_what_an_engine_says_at_its_end(make_job: MakeJob) -> None:
    job = make_job(ROWS)
    ended = told(job, "start")
    assert ended.code == 4
    assert f"401 for {HIDDEN} at http://user:{HIDDEN}@proxy:3128" in ended.err
    assert_kept(job, ended, *looks(job))


def test_secrets_in_a_spec_are_not_written_down(make_job: MakeJob) -> None:
    job = make_job(ROWS, engine={"env": {"HF_TOKEN": TOKEN, "VLLM_LOGGING_LEVEL": "INFO"}})
    ended = job.run()
    assert ended.code == 0
    assert_kept(job, ended, *looks(job))
    assert "VLLM_LOGGING_LEVEL: INFO" in (job.run_folder / "job.yaml").read_text()


def test_secrets_in_sentences_are_not_written_down(tmp_path: Path, known: None) -> None:
    run = RunDir(tmp_path)
    keep_secret({"SOME_API_KEY": "a-long-secret", "HOME": "not-secret-at-all", "OTHER_TOKEN": "short"})
    manifest = Manifest(run.manifest)
    manifest.append(
        {"record": "end", "message": "401 for a-long-secret, short, not-secret-at-all", "name": "a-long-secret"}
    )
    manifest.close()
    RunLog(run.log).write("said", text="a-long-secret")
    assert read_manifest(run.manifest)[-1]["message"] == f"401 for {HIDDEN}, short, not-secret-at-all"
    assert read_manifest(run.manifest)[-1]["name"] == "a-long-secret"
    assert "a-long-secret" not in run.log.read_text()


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        *(
            (name, True)
            for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "DB_PASSWORD", "GITHUB_PAT")
        ),
        *((name, True) for name in ("OPENAI_KEY", "GOOGLE_APPLICATION_CREDENTIALS", "api-key", "SENTRY_DSN", "MY_PWD")),
        *((name, False) for name in ("max_tokens", "tokenizer", "TOKENIZERS_PARALLELISM", "PWD2", "OLDPWD", "PATH")),
        *((name, False) for name in ("max_num_batched_tokens", "KEYBOARD", "monkey", "VLLM_LOGGING_LEVEL", "")),
    ],
)
def test_names_that_say_that_their_value_is_secret(name: str, secret: bool) -> None:
    assert is_secret(name) == secret


# ---- what a terminal would obey ----

EVIL = "\x1b]0;title\x07\x1b[2J\u202egnp\r\x9b31m\u2028"


def assert_harmless(ended: Ended) -> None:
    assert not set("\x1b\x07\r\u202e\x9b\u2028") & set(ended.out + ended.err), (ended.out, ended.err)


def test_no_row_drives_the_terminal(make_job: MakeJob) -> None:
    """Evil names and values wherever a sentence may show them: id, column, error, file name."""
    rows = [
        {"id": EVIL, "prompt": "good", EVIL: EVIL},
        {"id": EVIL + "2", "prompt": "", EVIL: EVIL},
        {"id": EVIL + "3", "prompt": {EVIL: EVIL}, EVIL: EVIL},
        json.dumps({"id": 4}) + EVIL.replace("\r", ""),
    ]
    job = make_job(input={"path": f"{EVIL[:6]}.jsonl"}, sampling={"max_tokens": {"column": EVIL, "default": 2}})
    job.write(rows, f"{EVIL[:6]}.jsonl")
    ended = job.run("--max-failures", "100%")
    assert ended.code == 3
    for one in (ended, *looks(job), bulkgen("render", str(job.path)), bulkgen("plan", str(job.path))):
        assert "Traceback" not in one.err
        assert_harmless(one)


@pytest.mark.parametrize(
    "change",
    [
        ("--set", f"input.id={EVIL}"),
        ("--set", f"{EVIL}=1"),
        ("--set", f"input.path={EVIL}"),
        ("--set", f"model={EVIL}"),
        ("--set", f"input.template={{{{ {EVIL} }}}}"),
        ("--retry", EVIL),
        ("--until", EVIL),
    ],
    ids=["column", "key", "path", "model", "template", "reason", "time"],
)
def test_no_setting_drives_the_terminal(make_job: MakeJob, change: tuple[str, str]) -> None:
    ended = make_job(ROWS).run(*change)
    assert ended.code in (2, 6)
    assert_harmless(ended)
