"""Commands, options and exit codes."""

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

import typer

from bulkgen import __version__
from bulkgen.errors import EXIT_BUG, EXIT_ROWS_FAILED, BulkgenError, DataError, SpecError, Stopped
from bulkgen.secrecy import hushed

if TYPE_CHECKING:
    from bulkgen.job import Outcome

_LONGEST_SENTENCE, _LONGEST_LINE = 4000, 1 << 20
# As shells have it for a command that Ctrl-C ended. A run has its own code, since it can go on.
_INTERRUPTED = 130

app = typer.Typer(
    name="bulkgen",
    help="Run a backlog of prompts through vLLM: full KV cache, no row lost or repeated, results in Parquet.",
    epilog="Exit codes: 0 all rows done, 1 a bug, 2 wrong option or job spec, 3 finished with failed rows, "
    "4 the engine could not start or kept dying, 5 another run holds the output, 6 input or output unusable, "
    "75 stopped before the end: run again to go on.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Job = Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job spec.", show_default=False)]
Output = Annotated[
    Path, typer.Argument(metavar="OUTPUT", help="A job's output path, or its run folder.", show_default=False)
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the spec: --set sampling.temperature=0.2"),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"bulkgen {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options that stand before a command."""


@app.command()
def run(
    job: Job,
    overrides: Set = None,
    changed: Annotated[
        Literal["again", "keep"] | None,
        typer.Option(
            help="Where prompt, model or sampling have changed since rows were done: generate all rows again, or keep "
            "what is done and use the new settings for the rest."
        ),
    ] = None,
    retry: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHAT",
            help="Do rows once more: failed, truncated (cut at max_tokens), or a code of errors or warnings.",
        ),
    ] = None,
    max_failures: Annotated[
        str | None,
        typer.Option(
            metavar="N|P%",
            help="Stop when more rows fail than this. Without it: when the first hundred rows all fail.",
        ),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Stop at this local time, as on SIGTERM: 06:30, or 2031-04-30T06:30."),
    ] = None,
    lasting: Annotated[
        str | None,
        typer.Option("--for", metavar="DURATION", help="Stop after this long, as on SIGTERM: 90m, 1h30m, 2d."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no tables; errors only.")] = False,
) -> None:
    """Run a job, or go on with it; a finished job returns at once, new rows alone are generated."""
    # Little is loaded before signals and the clock are heeded; the rest takes a second or two.
    from bulkgen.report import Progress
    from bulkgen.stopping import Deadline, StopFlag

    deadline = Deadline.parse(until, lasting)
    with Progress(quiet=quiet) as progress, StopFlag(progress.say, deadline, progress.now) as stop:
        kept = _nothing_yet
        try:
            with stop.at_once():
                from bulkgen.codes import RETRIABLE, check_codes
                from bulkgen.job import Options, run_job
                from bulkgen.limits import FailureLimit
                from bulkgen.spec import load_spec

                limit = FailureLimit.parse(max_failures)
                options = Options(
                    changed=changed, retry=check_codes("--retry", retry or (), RETRIABLE), failure_limit=limit
                )
                spec = load_spec(job, overrides or [])
            kept = partial(_how_far, spec.output_path)
            outcome = run_job(spec, progress, options, stop)
        except Stopped as e:
            raise Stopped(f"{e}; {kept()}; run the same command again to go on") from e
    if not quiet:
        with _for_whoever_listens():
            _show_outcome(outcome, spec.output_path)
    raise typer.Exit(outcome.exit_code)


def _nothing_yet() -> str:
    return "nothing was begun"


def _how_far(output: Path) -> str:
    """In words, what of a run is kept."""
    from bulkgen.report import load_status
    from bulkgen.rundir import RunDir

    try:
        state = load_status(RunDir.of_output(output).path, alive=False)
    except (BulkgenError, OSError, KeyError):
        return "what is committed is kept"
    if not state.rows:
        return "no row is done yet"
    failed = state.failed + state.refused
    return f"{state.done:,} of {state.rows:,} rows are done and committed" + (f", {failed:,} failed" if failed else "")


def _show_outcome(outcome: "Outcome", output: Path) -> None:
    from bulkgen.failing import failure_lines, load_failures
    from bulkgen.report import render_report
    from bulkgen.rundir import RunDir

    if outcome.note:
        _print(outcome.note)
    render_report(outcome.report, _console())
    if outcome.exit_code == EXIT_ROWS_FAILED:
        for line in failure_lines(load_failures(RunDir.of_output(output)), number=0):
            _print(line)
    _print(f"output: {output}")


@app.command()
def failures(
    output: Output,
    codes: Annotated[
        list[str] | None, typer.Option("--code", metavar="CODE", help="Only rows that failed with this code.")
    ] = None,
    number: Annotated[int, typer.Option("-n", min=0, help="How many rows to show.")] = 10,
    as_json: Json = False,
    export: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the failed rows as they came in to FILE.jsonl (or FILE.parquet where the input is Parquet), to "
            "be mended and run again.",
        ),
    ] = None,
) -> None:
    """Show which rows failed and why, while a run works or afterwards, and get them out."""
    from bulkgen.codes import ERRORS, check_codes
    from bulkgen.failing import export_failures, failure_json, failure_lines, load_failures
    from bulkgen.rundir import RunDir

    found = load_failures(RunDir.locate(output), check_codes("--code", codes or (), ERRORS))
    if export is not None:
        for line in export_failures(found, export):
            _say(line)
        return
    if as_json:
        _print_json(failure_json(found, number))
    else:
        for line in failure_lines(found, number):
            _print(line)


@app.command()
def render(
    job: Job,
    overrides: Set = None,
    number: Annotated[int, typer.Option("-n", min=1, help="How many rows to show.")] = 3,
    row: Annotated[str | None, typer.Option("--row", metavar="ID", help="Show the row with this id.")] = None,
) -> None:
    """Show what is sent for the first rows: text, token ids and counts, after the model's chat template."""
    from bulkgen.rendering import render_rows
    from bulkgen.spec import load_spec

    for line in render_rows(load_spec(job, overrides or []), number, row, _say):
        _print(line)


@app.command()
def plan(
    job: Job,
    overrides: Set = None,
    devices: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="NAME[,NAME]",
            help="Devices to plan for, side by side: h100,l40s, or cpu. Without it, this machine's.",
        ),
    ] = None,
    expected_output: Annotated[
        int | None,
        typer.Option(
            "--expected-output",
            min=1,
            metavar="TOKENS",
            help="What an answer is expected to have; else its max_tokens.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what a job will be like, without a GPU: shape, KV cache, engine settings, time, cost."""
    from bulkgen.outlook import look_ahead, outlook_json, outlook_tables
    from bulkgen.report import Progress, ProgressState, print_sheets
    from bulkgen.spec import load_spec
    from bulkgen.stopping import StopFlag

    names = [name for name in (devices or "").split(",") if name.strip()]
    with (
        Progress(quiet=as_json) as progress,
        StopFlag(progress.say, None, progress.now, keeps="") as stop,
        stop.at_once(),
    ):
        progress.stage("planning")
        outlook = look_ahead(
            load_spec(job, overrides or []),
            names,
            expected_output,
            progress.say,
            lambda rows, refused: progress.update(ProgressState(rows=rows, refused=refused)),
            stop.check,
        )
    if as_json:
        _print_json(outlook_json(outlook))
    else:
        print_sheets(outlook_tables(outlook), _console())


@app.command()
def tune(
    job: Job,
    overrides: Set = None,
    budget: Annotated[str, typer.Option(metavar="DURATION", help="How long all of it may take: 90s, 10m, 1h.")] = "10m",
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SETTING",
            help="Measure a setting that changes answers too, kv_cache_dtype or quantization: it is reported, and "
            "never kept.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure a few engine settings on a sample of the rows and keep the best for later runs."""
    from bulkgen.report import Progress, print_sheets
    from bulkgen.stopping import StopFlag, duration_s

    budget_s = duration_s("--budget", budget)
    with Progress(quiet=as_json) as progress, StopFlag(progress.say, None, progress.now, keeps="") as stop:
        with stop.at_once():
            from bulkgen.spec import load_spec
            from bulkgen.tune import tune_job, tuning_json, tuning_tables

            spec = load_spec(job, overrides or [])
        tuning = tune_job(spec, budget_s, allow or [], progress, stop)
    if as_json:
        _print_json(tuning_json(tuning))
    else:
        print_sheets(tuning_tables(tuning), _console())


@app.command()
def status(output: Output, as_json: Json = False) -> None:
    """Show how far a run is, from another terminal or after the fact."""
    from bulkgen.report import load_status, render_status, status_json
    from bulkgen.rundir import RunDir

    run_dir = RunDir.locate(output)
    state = load_status(run_dir.path, run_dir.is_held())
    if as_json:
        _print_json(status_json(state))
    else:
        render_status(state, _console())


@app.command()
def report(output: Output, as_json: Json = False) -> None:
    """Show a run's throughput, latency and cost over all its starts."""
    from bulkgen.accounts import summarize_run
    from bulkgen.report import render_report, report_json
    from bulkgen.rundir import RunDir, read_manifest

    run_dir = RunDir.locate(output)
    loaded = summarize_run(run_dir, read_manifest(run_dir.manifest))
    if as_json:
        _print_json(report_json(loaded))
    else:
        render_report(loaded, _console())


@app.command()
def schema() -> None:
    """Print the JSON Schema of the job spec, for editors and checks."""
    from bulkgen.spec import spec_json_schema

    _print_json(spec_json_schema())


@app.command("demo-model")
def demo_model() -> None:
    """Prepare the small demo model (once) and print its folder."""
    from bulkgen.engine.demo_model import prepare_demo_model

    _print(prepare_demo_model(_say))


def _say(text: str) -> None:
    """A line for people, with nothing in it that a terminal obeys and no secret."""
    from bulkgen.report import visible

    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, full or no standard error at all
        print(visible(hushed(text), sys.stderr.encoding or "ascii", _LONGEST_SENTENCE), file=sys.stderr, flush=True)


class _NobodyReadsError(Exception):
    """The reader of standard output has seen enough. No OSError, since typer would end the process with 1 for it."""


@contextlib.contextmanager
def _pipe_watched() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as e:
        raise _NobodyReadsError from e


def _print(value: object) -> None:
    """A line on standard output, with nothing in it that a terminal obeys."""
    from bulkgen.report import visible

    with _pipe_watched():
        print(visible(str(value), sys.stdout.encoding or "ascii", _LONGEST_LINE))


@contextlib.contextmanager
def _for_whoever_listens() -> Iterator[None]:
    """Print what is nice to know: if nobody reads it, neither the result nor the exit code is another."""
    try:
        yield
        sys.stdout.flush()
    except (OSError, ValueError, AttributeError, _NobodyReadsError):
        _hush()


def _open_standard_streams() -> None:
    """Where one of them is closed (cron, daemons), nothing else that is opened may take its number."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - by number, and for good
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _hush(stream: TextIO | None = None) -> None:
    """Let what is left in the buffer of a stream, standard output unless told, go nowhere."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), (stream or sys.stdout).fileno())


def _settle() -> None:
    """Hush whom nobody listens to. Python would flush them once more as it ends, and make 120 of the exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            _hush(stream)


def _print_json(value: Any) -> None:
    # Escaped as far as JSON can, so that it may be looked at, in whatever encoding.
    with _pipe_watched():
        print(json.dumps(value, indent=2, default=str).replace("\x7f", "\\u007f"))


def _console() -> Any:
    from rich.console import Console

    class PlainConsole(Console):
        def on_broken_pipe(self) -> None:
            raise _NobodyReadsError  # rich would end the process with 1, whatever the command has to say

    return PlainConsole()


def _guarded(call: Callable[[], Any]) -> int:
    """Run a command; every end is an exit code, and only a bug shows a traceback."""
    try:
        code = call()
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except BulkgenError as e:
        # A wrong spec is told in several sentences; in others a line's end belongs to a name, and is shown as that.
        for line in str(e).split("\n") if isinstance(e, SpecError) else [str(e)]:
            _say(f"bulkgen: {line}")
        return e.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED
    except (BrokenPipeError, _NobodyReadsError):
        # The reader of a table has seen enough. A run never comes here: it prints for whoever listens.
        _hush()
        return 0
    except OSError as e:
        # Readers and writers of data speak for themselves; this is about the files around them.
        _hush()
        _say(f"bulkgen: {e.filename or 'standard output'}: {e.strerror or e}; free the place or give another")
        return DataError.exit_code
    except Exception as e:
        if isinstance(e.__cause__, KeyboardInterrupt):
            return _INTERRUPTED
        if hasattr(e, "show") and hasattr(e, "exit_code"):  # a usage error, whichever click typer brings along
            shown = io.StringIO()
            e.show(shown)
            _say_lines(shown.getvalue())
            return int(e.exit_code)
        import traceback

        _say_lines(traceback.format_exc())
        _say("bulkgen: this is a bug in bulkgen; what was committed is safe, and running again goes on from there")
        return EXIT_BUG


def _say_lines(text: str) -> None:
    for line in text.rstrip("\n").split("\n"):
        _say(line)


def main() -> None:
    """Entry point of the `bulkgen` command."""
    _open_standard_streams()
    command = typer.main.get_command(app)
    code = _guarded(lambda: command.main(standalone_mode=False))
    _settle()
    sys.exit(code)
