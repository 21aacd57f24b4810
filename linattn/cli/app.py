"""The commands: options in; tables on stdout, progress and errors on stderr."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from linattn.cli.completion import complete_map, complete_method, list_maps, list_methods
from linattn.cli.errors import CommandError, RunError, UserCodeError
from linattn.cli.text import say

if TYPE_CHECKING:
    from linattn.cli.settings import Settings

__all__ = ["app"]

_UsageError: Any = typer.BadParameter.__base__


class _OneLineGroup(TyperGroup):
    """Errors of usage as one line, like all others."""

    def main(self, *args: Any, **options: Any) -> Any:
        try:
            code = super().main(
                *args, **options | {"prog_name": "linattn", "standalone_mode": False}
            )
        except _UsageError as error:
            where = error.ctx.command_path if error.ctx else "linattn"
            message = f"{error.format_message().rstrip('.')}; see {where} --help"
            _fail(message)
            code = 2
        raise SystemExit(code)


# What only a running command needs is imported inside it: --help stays quick.
app = typer.Typer(
    cls=_OneLineGroup,
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show(text: Callable[[], str]) -> Callable[[bool], None]:
    """Make the callback of a flag that prints something and ends the command."""

    def callback(wanted: bool) -> None:
        if wanted:
            typer.echo(text())
            raise typer.Exit

    return callback


def _version() -> str:
    from linattn.cli import info

    return info.version()


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show(_version), is_eager=True, help="Show the version."
        ),
    ] = False,
) -> None:
    """Measure linear attention against exact softmax attention."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


# Options of compare, named here so that its signature can be read.
_InputFile = Annotated[
    Path | None,
    typer.Option(
        "--input",
        metavar="FILE",
        help="The same as FILES, for one file.",
    ),
]
_CompareFiles = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[FILES]",
        help="Three .npy files, query, key and value, each (..., length, dim); or one .npz file or "
        ".zarr store with arrays of these names. Leading axes are heads. Without files: the real "
        "sample that linattn ships.",
    ),
]
_Maps = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAMES",
        autocompletion=complete_method,
        help="Feature maps to measure: favor+, hyperbolic, trigonometric, relu-performer, "
        "elu+1, relu, landmarks, landmarks+window, calibrated+window, coreset. Or published "
        "attentions, see --list. Repeat the option or use commas, here and below.  "
        "[default: all maps that fit]",
    ),
]
_ListMaps = Annotated[
    bool,
    typer.Option(
        "--list",
        callback=_show(list_methods),
        is_eager=True,
        help="Say what these are, and exit.",
    ),
]
_Baselines = Annotated[
    bool,
    typer.Option(
        "--baselines", help="Measure published attentions beside the maps, at equal cost."
    ),
]
_NumFeatures = Annotated[
    list[str] | None,
    typer.Option(metavar="NUMBERS", help="Columns of the maps.  [default: 64,128,256,1024]"),
]
_Causal = Annotated[
    bool, typer.Option("--causal", help="Let each query see the keys up to its own only.")
]
_Lengths = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NUMBERS",
        help="Sequence lengths of the time curves.  [default: 256, doubled up to 65536]",
    ),
]
_TimeBudget = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        help="For the time curves; points that would not fit are left out and named.",
    ),
]
_Seed = Annotated[int, typer.Option(metavar="NUMBER", help="Of everything random.")]
_Draws = Annotated[
    int,
    typer.Option(
        metavar="NUMBER", help="Draws of each map with columns; errors are over all of them."
    ),
]
_MaxTokens = Annotated[
    int, typer.Option(metavar="NUMBER", help="Tokens of a head in the error table, at most.")
]
_MaxHeads = Annotated[
    int, typer.Option(metavar="NUMBER", help="Heads in the error table, at most.")
]
_Out = Annotated[
    Path,
    typer.Option(
        metavar="DIR",
        help="Folder for compare.json, error.png, time.png and, with published attentions, "
        "frontier.png.",
    ),
]
_Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object in the place of tables and lines.")
]
_Brief = Annotated[bool, typer.Option("--brief", help="Print the verdict only.")]


@app.command(short_help="Is a feature map good enough, and faster?")
def compare(
    files: _CompareFiles = None,
    input_file: _InputFile = None,
    maps: _Maps = None,
    list_maps: _ListMaps = False,
    baselines: _Baselines = False,
    num_features: _NumFeatures = None,
    causal: _Causal = False,
    lengths: _Lengths = None,
    time_budget: _TimeBudget = 25.0,
    seed: _Seed = 0,
    draws: _Draws = 5,
    max_tokens: _MaxTokens = 2048,
    max_heads: _MaxHeads = 32,
    out: _Out = Path("linattn-compare"),
    as_json: _Json = False,
    brief: _Brief = False,
) -> None:
    """Measure feature maps against exact attention, and say whether one is good enough."""
    with _one_line_errors():
        from linattn.cli import methods, settings

        try:
            texts = methods.without_labels(maps or [])
            names = settings.words("--maps", texts, "name") if maps else ()
            chosen = methods.select(names)
        except ValueError as error:
            raise CommandError(f"--maps: {error}") from None
        counts = settings.integers(
            "--num-features",
            num_features or settings.NUM_FEATURES,
            minimum=1,
            maximum=settings.MAX_FEATURES,
        )
        if files and input_file is not None:
            raise CommandError(f"--input {input_file}: not with FILES, which are inputs too")
        _compare(
            settings.Settings(
                files=tuple(files or ([] if input_file is None else [input_file])),
                maps=tuple(method.name for method in chosen),
                baselines=baselines,
                num_features=counts,
                lengths=settings.integers(
                    "--lengths",
                    lengths or settings.LENGTHS,
                    minimum=1,
                    maximum=settings.MAX_LENGTH,
                ),
                is_causal=causal,
                seed=seed,
                time_budget=time_budget,
                draws=draws,
                max_tokens=max_tokens,
                max_heads=max_heads,
                out=out,
            ),
            as_json=as_json,
            brief=brief,
        )


@app.command(short_help="What is installed here, for bug reports.")
def info(as_json: _Json = False) -> None:
    """Show versions, backends, BLAS, threads and GPUs: for bug reports."""
    from linattn.cli import info as here

    _print_json(here.record()) if as_json else typer.echo(here.text())


@app.command(short_help="Is a feature map what it claims to be?")
def verify(
    target: Annotated[
        str,
        typer.Argument(
            metavar="NAME|MODULE:OBJECT",
            autocompletion=complete_map,
            help="A feature map of linattn by its class, such as PositiveFeatures; or a map of "
            "your own, or factory(rng) that makes one, in a module that can be imported here.",
        ),
    ],
    dim: Annotated[int, typer.Option(metavar="NUMBER", help="Of a shipped map.")] = 8,
    num_features: Annotated[
        int | None,
        typer.Option(metavar="NUMBER", help="Of a shipped map.  [default: the map's own]"),
    ] = None,
    sampler: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Of a shipped map.  [default: the map's own]"),
    ] = None,
    draws: Annotated[
        int, typer.Option(metavar="NUMBER", help="Draws of the map for mean and variance each.")
    ] = 4000,
    seed: Annotated[
        int, typer.Option(metavar="NUMBER", help="Of everything random; another for fresh draws.")
    ] = 0,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show where code of yours raises an error.")
    ] = False,
    list_maps: Annotated[
        bool,
        typer.Option(
            "--list", callback=_show(list_maps), is_eager=True, help="Show the maps known by name."
        ),
    ] = False,
    as_json: _Json = False,
) -> None:
    """Check the claims of a feature map: mean, variance, causality, streaming, arrays.

    Exit code: 0 all is well; 1 a check failed; 2 a wrong name or option; 3 no check failed, but the
    mean was not checked; 4 the factory raised an error.
    """
    with _one_line_errors():
        from rich.console import Console

        from linattn.cli import maps
        from linattn.cli import verify as checks

        choice = maps.Choice(dim, num_features, sampler, seed)
        found = maps.find_map(target, choice, show_traceback=traceback)
        with _progress(checks.num_checks()) as notify:
            report = checks.verify(
                found, num_draws=draws, seed=seed, notify=notify, show_traceback=traceback
            )
    if as_json:
        _print_json(checks.record(report))
    else:
        console = Console(markup=False, highlight=False, emoji=False)
        console.print(checks.report_table(report))
        for text in (*checks.failures(report), report.summary, report.reservation):
            if text:
                console.print(text)
    if not report.passed:
        raise typer.Exit(1)
    if report.reservation:
        raise typer.Exit(3)


# Options of attend.
_Files = Annotated[
    list[Path],
    typer.Argument(
        metavar="FILES",
        help="Three .npy files, query, key and value, each (..., length, dim); or one .npz file "
        "(not compressed) or .zarr store with arrays of these names.",
    ),
]
_OutFile = Annotated[
    Path,
    typer.Option(
        metavar="FILE",
        help="Where the output goes: an .npy file, or the array output of a .zarr store.",
    ),
]
_Map = Annotated[
    str | None,
    typer.Option(
        "--map",
        metavar="NAME",
        autocompletion=complete_map,
        help="Feature map: a class of linattn such as PositiveFeatures (see verify --list), a "
        "name of a map in compare --list, or MODULE:OBJECT; or exact, for exact attention in "
        "quadratic time.  [default: landmarks; with --causal favor+]",
    ),
]
_Mask = Annotated[
    Path | None,
    typer.Option(metavar="FILE.npy", help="Which keys count: boolean, (length,) or as the key."),
]
_Window = Annotated[
    int | None,
    typer.Option(metavar="TOKENS", help="Weigh near keys exactly, in blocks of so many tokens."),
]
_StartState = Annotated[
    Path | None, typer.Option(metavar="FILE.npz", help="State of the keys before these.")
]
_SaveState = Annotated[
    Path | None, typer.Option(metavar="FILE.npz", help="Where to save the state after all keys.")
]
_Check = Annotated[
    int | None,
    typer.Option(metavar="ROWS", help="Rows of a head computed exactly at last.  [default: 64]"),
]
_Tolerance = Annotated[
    float,
    typer.Option(
        metavar="NUMBER",
        help="Largest relative error of a head on these rows; above it the exit code is 3. inf for "
        "a model that was trained with the map.",
    ),
]
_BlockSize = Annotated[
    int | None,
    typer.Option(
        metavar="ROWS", help="Rows in memory at once.  [default: 65536, or 256 MiB if fewer]"
    ),
]
_Workers = Annotated[
    int | None,
    typer.Option(metavar="NUMBER", help="Processes of Dask; pays where one takes some minutes."),
]
_Scheduler = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="A Dask cluster that is running, as tcp://HOST:PORT."),
]
_Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with a run that broke off, if there is one.")
]


@app.command(short_help="Attention from files to a file, larger than memory.")
def attend(
    files: _Files,
    out: _OutFile,
    map_name: _Map = None,
    num_features: Annotated[
        int | None, typer.Option(metavar="NUMBER", help="Columns.  [default: the map's own]")
    ] = None,
    causal: _Causal = False,
    mask: _Mask = None,
    window: _Window = None,
    start_state: _StartState = None,
    save_state: _SaveState = None,
    check: _Check = None,
    tolerance: _Tolerance = 0.1,
    block_size: _BlockSize = None,
    seed: _Seed = 0,
    workers: _Workers = None,
    scheduler: _Scheduler = None,
    resume: _Resume = False,
    as_json: _Json = False,
) -> None:
    """Attend a block at a time, from files to a file; memory does not grow with their length.

    A run that is interrupted or killed continues with --resume, and ends in the same bytes.

    Exit code: 0 done, and within the tolerance; 1 the run broke off; 2 something is wrong with what
    was given, nothing was written; 3 written, but above the tolerance, or not checked; 130
    interrupted.
    """
    with _one_line_errors():
        from linattn.cli import attend as files_to_file

        settings = files_to_file.Settings(
            tuple(files),
            out,
            ("favor+" if causal else "landmarks") if map_name is None else map_name,
            num_features,
            causal,
            mask=mask,
            window=window,
            start_state=start_state,
            save_state=save_state,
            check=check,
            tolerance=tolerance,
            block_size=block_size,
            seed=seed,
            workers=workers,
            scheduler=scheduler,
            resume=resume,
        )
        with _rows_progress() as progress:
            summary = files_to_file.run(settings, progress, _warn)
    if as_json:
        _print_json(summary.record())
    else:
        say(str(summary), whole=True)
    if summary.failure:
        _fail(summary.failure)
        raise typer.Exit(3)


def _print_json(record: dict[str, Any]) -> None:
    from linattn.cli.report import as_json

    typer.echo(as_json(record).decode().rstrip())


def _compare(settings: Settings, *, as_json: bool, brief: bool) -> None:
    from rich.console import Console

    from linattn.cli import inputs, plots, report, tables
    from linattn.cli.published import NEED_TRAINING
    from linattn.cli.run import ALL, run, steps

    given = inputs.load(*settings.files) if settings.files else inputs.sample()
    by_cost = settings.baselines or not set(settings.maps) <= ALL
    names = (*report.FILES, *([report.FRONTIER] if by_cost else []))
    report.prepare_folder(settings.out, names)
    if given.question:
        _warn(given.question)
    with _progress(steps(settings, given)) as notify:
        results = run(settings, given, notify)
    found, is_causal = results.sweep, settings.is_causal
    of_rows = (results.rows, results.inputs)
    figures = [
        plots.error_figure(*of_rows, is_causal=is_causal),
        plots.time_figure(found, results.inputs, is_causal=is_causal),
    ]
    if by_cost:
        figures.append(plots.frontier_figure(*of_rows, is_causal=is_causal))
    contents = (report.as_json(results.record()), *map(plots.png, figures))
    for name, content in zip(names, contents, strict=True):
        report.write(settings.out / name, content)

    if as_json:
        return _print_json(results.record())
    if brief:
        return say(f"Verdict: {results.verdict.sentence}", whole=True)
    # A narrower terminal breaks the lines of a table; nothing may be cut off.
    width = max(tables.WIDTH, shutil.get_terminal_size().columns)
    console = Console(markup=False, highlight=False, emoji=False, width=width)
    say(f"Input: {results.inputs.source}", whole=True)
    if results.inputs.left_out:
        say(f"Left out of the error table: {'; '.join(results.inputs.left_out)}.")
    table = tables.cost_table if by_cost else tables.error_table
    console.print(table(*of_rows, is_causal=is_causal))
    if by_cost and (settings.baselines or results.left_out):
        say(tables.left_out_methods_text(results.left_out, NEED_TRAINING))
    if any(row.failure for row in results.rows):
        say(tables.failures_text(results.rows))
    say(tables.norms_text(results.norms))
    console.print(tables.time_table(found, is_causal=is_causal))
    say(tables.crossover_text(found))
    if found.left_out:
        say(tables.left_out_text(found))
    say(f"Written to {settings.out}: {', '.join(names)}", whole=True)
    say(f"Verdict: {results.verdict.sentence}", whole=True)


@contextmanager
def _bar(*columns: Any) -> Iterator[Any]:
    """Show a bar on stderr if it is a terminal, and yield it; else yield None."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress

    console = Console(stderr=True, markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        # Rich before 15.0 ends even a disabled bar with an empty line.
        yield None
        return
    with Progress(BarColumn(bar_width=24), *columns, console=console, transient=True) as progress:
        yield progress


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """Show steps done; call the function it yields before each step."""
    from rich.progress import MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    left = TextColumn("passed, about")
    text = TextColumn("left: {task.description}", markup=False)
    columns = (MofNCompleteColumn(), TimeElapsedColumn(), left, TimeRemainingColumn(), text)
    with _bar(*columns) as progress:
        task = progress and progress.add_task("", total=total)
        begun = 0

        def notify(description: str) -> None:
            nonlocal begun
            if progress:
                progress.update(task, completed=begun, description=description)
            begun += 1

        yield notify


@contextmanager
def _rows_progress() -> Iterator[Callable[[int, int], None]]:
    """Show rows done, their rate and the time left."""
    from rich.progress import TaskProgressColumn, TextColumn, TimeRemainingColumn

    rate = TextColumn("{task.fields[rate]} rows a second,", markup=False)
    left = TextColumn("left", markup=False)
    with _bar(TaskProgressColumn(), rate, TimeRemainingColumn(), left) as progress:
        task = None

        def notify(done: int, total: int) -> None:
            nonlocal task
            if progress and task is None:
                # What an earlier run did has no rate.
                task = progress.add_task("", total=total, completed=done, rate="?")
            elif progress:
                progress.update(task, completed=done)
                speed = progress.tasks[0].speed
                progress.update(task, rate="?" if speed is None else f"{speed:,.0f}")

        yield notify


def _warn(sentence: str) -> None:
    say(f"linattn: warning: {' '.join(sentence.split())}", error=True)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as error:
        if error.args:
            _fail(str(error))
        raise
    except RunError as error:
        _fail(str(error))
        raise typer.Exit(1) from None
    except CommandError as error:
        _fail(str(error))
        raise typer.Exit(2) from None
    except UserCodeError as error:
        _fail(str(error))
        raise typer.Exit(4) from None
    except MemoryError:
        _fail("not enough memory: try smaller --lengths, --max-heads or --max-tokens")
        raise typer.Exit(2) from None


def _fail(message: str) -> None:
    say(f"linattn: error: {' '.join(message.split())}", error=True)
