"""`bench pd`: what it costs to compute a prompt on one engine and to answer on another, beside one plain engine that does both.

One set of engines runs at a time, a plain engine beside it. What is compared is asked in turns, with prompts that nobody has
asked before; of each prompt the subject's answer is compared with the plain engine's.

    first     the first request ever through a new set, against the second
    single    time to the first token of one prompt, nothing else to do; CPU seconds
    burst     several prompts at once: time until all have their first token
    between   time between tokens of requests that run on decode while KV comes, against idle
"""

from __future__ import annotations

from pathlib import Path

import typer

from vllm_mooncake_ascend.cli.bench import run

SUBJECTS = ("after_prefill", "stream", "in_tree", "nixl")
PARTS = ("first", "single", "burst", "between")
TOKENS = (1025, 2049, 4097)
_AGAIN = "may be given again; all by default"


def pd(
    model: Path = typer.Option(Path("build/models/smollm2-135m-instruct"), help="Model folder."),
    dtype: str = typer.Option("bfloat16", help="bfloat16, float16 or float32."),
    subjects: list[str] = typer.Option(SUBJECTS, "--subject", help=f"What to measure; {_AGAIN}."),
    tokens: list[int] = typer.Option(
        TOKENS,
        min=130,
        max=7900,
        help="Tokens of a prompt; may be given again. One more than whole blocks of 128, so that decode and a plain engine "
        "take the same last step.",
    ),
    parts: list[str] = typer.Option(PARTS, "--part", help=f"first, single, burst or between; {_AGAIN}."),
    rounds: int = typer.Option(7, min=1, help="Samples of each figure but of the first request, of which there is one a set."),
    set_minutes: float = typer.Option(15.0, min=0.5, help="Time for the rounds of one set; then it is cut short."),
    seed: int = run.SEED,
    max_foreign_cores: float = run.FOREIGN_CORES,
    json_path: Path = run.JSON,
    plots: Path = run.PLOTS,
) -> None:
    """Prefill on one engine, decode on another: time to the first token, between tokens, and CPU, with real engines."""
    from vllm_mooncake_ascend.cli.bench.pd_answers import NEAR_TIES
    from vllm_mooncake_ascend.cli.bench.pd_report import measure_all
    from vllm_mooncake_ascend.cli.bench.pd_sets import Plan
    from vllm_mooncake_ascend.cli.bench.pd_subjects import Options

    if not (model / "config.json").is_file():
        raise typer.BadParameter(f"no model in {model}; `make models` makes the default one", param_hint="--model")
    _refuse_unknown(subjects, SUBJECTS, "--subject")
    _refuse_unknown(parts, PARTS, "--part")
    _refuse_unknown([dtype], tuple(NEAR_TIES), "--dtype")
    this = run.Run("bench pd", num_rounds=rounds, seed=seed, max_foreign_cores=max_foreign_cores)
    options = Options(model=model, dtype=dtype, max_tokens=max(tokens))
    plan = Plan(tokens=tuple(sorted(set(tokens))), parts=tuple(dict.fromkeys(parts)), set_s=60 * set_minutes)
    try:
        problems = measure_all(this, tuple(dict.fromkeys(subjects)), options, plan)
    except KeyboardInterrupt:
        typer.echo("interrupted; all servers have been stopped", err=True)
        raise typer.Exit(130) from None
    this.finish(json_path, plots)
    for problem in problems:
        typer.echo(f"error: {problem}", err=True)
    raise typer.Exit(1 if problems else 0)


def _refuse_unknown(given: list[str], known: tuple[str, ...], option: str) -> None:
    unknown = [word for word in given if word not in known]
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}: known are {', '.join(known)}", param_hint=option)
