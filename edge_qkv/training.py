"""The training recipe: a text file in, a checkpoint directory (config, weights, tokenizer) out.

Small models on one CPU: byte-level BPE, AdamW, warm-up and cosine, bfloat16 autocast where the processor
has it. A run stopped by Ctrl-C or SIGTERM goes on from its last step, one that was killed from its last evaluation,
and a finished one with more steps.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import math
import signal
import threading
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from tqdm import tqdm

from edge_qkv import files
from edge_qkv.errors import InputError
from edge_qkv.model import Decoder
from edge_qkv.processors import processors
from edge_qkv.recipe import HELD_TEXT, Recipe, small_config

END_OF_TEXT = "<|endoftext|>"  # separates documents in the data file
_STATE, _WEIGHTS = "training-state.pt", "model.safetensors"
_HELD_CHARACTERS = 1 << 18
_MOST_PARAMETERS = 1_000_000_000  # weights, gradients and AdamW's two moments: 16 GB in fp32


def split_held_out(text: str, fraction: float) -> tuple[str, str]:
    """Splits off the last `fraction`, at the next document boundary where there is one, else at a line end."""
    cut = int(len(text) * (1 - fraction))
    boundary = text.find(END_OF_TEXT, cut)
    if boundary < 0:
        boundary = text.find("\n", cut) + 1
    return text[:boundary], text[boundary:].removeprefix(END_OF_TEXT).lstrip("\n")


@functools.lru_cache(maxsize=1)  # a benchmark trains many models on one text
def train_tokenizer(text: str, vocab_size: int) -> Tokenizer:
    """Byte-level BPE: every string has an encoding, and it decodes to itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return tokenizer


@functools.lru_cache(maxsize=2)  # what is trained on, and what is held out
def _encoded(text: str, tokenizer: str) -> Tensor:
    """Ids [n] of a text; tokenizer: as JSON."""
    return torch.tensor(Tokenizer.from_str(tokenizer).encode(text).ids)


@torch.no_grad()
def held_out_loss(model: Decoder, tokens: Tensor, context: int) -> float:
    """Mean negative log-likelihood in nats a token over tokens [n], in windows of `context`."""
    was_training = model.training
    model.eval()
    total, count = 0.0, 0
    for start in range(0, len(tokens) - 1, context):
        window = tokens[start : start + context + 1]
        logits, _ = model(window[None, :-1])  # [1, T, V]
        total += F.cross_entropy(logits[0].float(), window[1:], reduction="sum").item()
        count += len(window) - 1
    model.train(was_training)
    return total / count


def train(data: Path, output: Path, recipe: Recipe, model_options: dict, vocab_size: int, weights: str) -> dict:
    """Trains and writes `output`; returns the report that is also written to `training.json`.

    model_options: variant, query, positions and what else `small_config` takes; weights: 'fp16' or 'fp32'.
    A directory that holds a run with the same options is continued: an interrupted one, and with more steps a finished
    one as well. With more steps the learning rate is from there on that of the longer schedule: it rises again where it
    had come down, and the weights are not those of a run that had as many steps from its start.
    Stopped by SIGINT or SIGTERM, it saves its last whole step and passes the signal on to the handler before it; where
    that returns, `KeyboardInterrupt` is raised. This is for the main thread: elsewhere signals are the caller's.
    """
    check_sizes(recipe, model_options, vocab_size)  # before anything is read
    text = files.read_text(data, "--data")
    train_text, held_text = split_held_out(text, recipe.held_out)
    identity = _identity(text, recipe, model_options, vocab_size, weights)
    saved = _saved_state(output, identity)
    _check_steps(output, saved, recipe.steps)
    tokenizer = Tokenizer.from_str(saved["tokenizer"]) if saved else train_tokenizer(train_text, vocab_size)
    config = small_config(tokenizer.get_vocab_size(), recipe.context, **model_options)
    tokens, held = (_encoded(part, tokenizer.to_str()) for part in (train_text, held_text))
    if len(tokens) <= recipe.context + 1 or len(held) < 2:
        raise InputError(
            f"--data {data}: too short: {len(tokens)} tokens to train on (--context is {recipe.context}), "
            f"{len(held)} held out (--held-out is {recipe.held_out})"
        )

    torch.set_num_threads(min(torch.get_num_threads(), processors()))  # it knows nothing of quotas
    torch.manual_seed(recipe.seed)
    model = Decoder(config, dropout=recipe.dropout)
    model.init_weights(torch.Generator().manual_seed(recipe.seed))
    optimizer = _optimizer(model, recipe)
    state = {"step": 0, "loss": math.nan, "history": [], "seconds": 0.0, "extended_at": []}
    if saved:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        state = saved["state"]
    print(
        f"{config.variant}, {config.parameters():,} parameters, {len(tokens):,} tokens to train on; "
        f"steps {state['step'] + 1} to {recipe.steps} of {recipe.batch * recipe.context:,} tokens each",
        flush=True,
    )
    if saved and recipe.steps > saved["steps"]:
        state["extended_at"].append(state["step"])
        print(
            f"the schedule of {saved['steps']} steps becomes one of {recipe.steps}: the learning rate goes on at "
            f"{_learning_rate(state['step'], recipe):.2g}",
            flush=True,
        )
    _make_directory(output)

    def save_state() -> None:
        parts = {"identity": identity, "steps": recipe.steps, "tokenizer": tokenizer.to_str(), "state": state}
        parts |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        buffer = io.BytesIO()
        torch.save(parts, buffer)
        files.write_atomically(output / _STATE, buffer.getbuffer())

    _run_steps(model, optimizer, tokens, held, recipe, state, save_state)
    return _write_checkpoint(model, output, recipe, state, tokenizer, held, held_text, weights, identity)


def check_sizes(recipe: Recipe, model_options: dict, vocab_size: int) -> None:
    """Raises `InputError` for a model that `train` would not begin."""
    if not 257 <= vocab_size <= 1 << 20:
        raise InputError(f"--vocab-size {vocab_size}: must be from 257 (the bytes and an end of text) to {1 << 20}")
    planned = small_config(vocab_size, recipe.context, **model_options)
    if planned.parameters() > _MOST_PARAMETERS:
        raise InputError(
            f"these sizes make {planned.parameters():,} parameters; this recipe is for at most {_MOST_PARAMETERS:,}: "
            "lower --width, --layers, --mlp-width or --vocab-size"
        )


def trained(
    data: Path, output: Path, recipe: Recipe, model_options: dict, vocab_size: int, weights: str
) -> dict | None:
    """The report of the checkpoint that `train` has written to `output` with these arguments; None: not yet.

    Raises `InputError` where `output` holds a run of other ones.
    """
    check_sizes(recipe, model_options, vocab_size)
    identity = _identity(files.read_text(data, "--data"), recipe, model_options, vocab_size, weights)
    if not (output / _WEIGHTS).exists():
        saved = _saved_state(output, identity)
        if saved and (saved["steps"] != recipe.steps or saved["state"]["extended_at"]):
            raise InputError(f"--output {output}: holds an unfinished run of other --steps; choose another place")
        return None
    report = _report(output)
    same = report["identity"] == _digest(identity) and report["recipe"]["steps"] == recipe.steps
    if not same or report["extended_at"]:
        raise InputError(f"--output {output}: holds a checkpoint of other options or data; choose another place")
    return report


def _identity(text: str, recipe: Recipe, model_options: dict, vocab_size: int, weights: str) -> str:
    """What a run is told from others by: all but its number of steps, which can grow."""
    numbers = {name: value for name, value in asdict(recipe).items() if name != "steps"}
    return json.dumps([numbers, model_options, vocab_size, weights, _digest(text)], sort_keys=True)


def _saved_state(output: Path, identity: str) -> dict | None:
    """The state of the run in `output`, which must be of the same options and data; None: nothing is there."""
    if output.exists() and not output.is_dir():
        raise InputError(f"--output {output}: is a file; name a directory")
    if not (output / _STATE).exists():
        if (output / _WEIGHTS).exists():
            raise InputError(
                f"--output {output}: holds a finished checkpoint without the {_STATE} that it could go on from; "
                "choose another place"
            )
        return None
    try:
        saved = torch.load(output / _STATE, weights_only=True)
        same = saved["identity"] == identity
    except Exception:  # pickle, zip and tensor errors of many kinds
        raise InputError(f"{output / _STATE}: is damaged; remove it to start again") from None
    if not same:
        raise InputError(f"--output {output}: holds a run of other options or data; choose another place")
    return saved


def _check_steps(output: Path, saved: dict | None, steps: int) -> None:
    """A run is never shortened, and one that is finished goes on only with more steps."""
    if saved is None:
        return
    if steps < saved["steps"]:
        raise InputError(f"--steps {steps}: the run in {output} is one of {saved['steps']}; give as many or more")
    if (output / _WEIGHTS).exists() and steps <= _report(output)["recipe"]["steps"]:
        raise InputError(
            f"--output {output}: holds a finished checkpoint of {steps} steps; give more --steps to train it on, or "
            "choose another place"
        )


def _report(output: Path) -> dict:
    """The report beside a finished checkpoint."""
    path = output / "training.json"
    try:
        report = json.loads(files.read_text(path, "report"))
        if not isinstance(report["recipe"]["steps"], int) or not {"identity", "extended_at"} <= report.keys():
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InputError(f"{path}: is damaged or of another version; choose another place for --output") from None
    return report


def _make_directory(output: Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output {output}: cannot be written ({error.strerror})") from None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _run_steps(model, optimizer, tokens, held, recipe: Recipe, state: dict, save_state) -> None:
    autocast = torch.backends.mkldnn.is_available() and "avx512_bf16" in _cpu_flags()
    progress = tqdm(total=recipe.steps, initial=state["step"], unit="step", mininterval=1.0, disable=None)
    model.train()
    offsets = torch.arange(recipe.context + 1)
    with _Interrupt() as interrupt, progress:
        while True:
            step, history = state["step"], state["history"]
            evaluated = step == 0 or (history and history[-1]["step"] == step)
            if not evaluated and (step % recipe.evaluate_every == 0 or step == recipe.steps):
                save_state()  # before: a process that is to end may be given less time than an evaluation takes
                held_loss = held_out_loss(model, held, recipe.context)
                _check_finite(held_loss, step, recipe)
                history.append({"step": step, "loss": state["loss"], "held_out": held_loss})
                minutes = state["seconds"] / 60
                progress.write(f"step {step}, {minutes:.1f} minutes: held-out perplexity {_perplexity(held_loss):.2f}")
            if interrupt.received is not None:
                save_state()
                progress.write(f"saved at step {step}; the same command goes on from there")
                break
            if step == recipe.steps:
                save_state()  # with its evaluation: more steps can follow
                return
            began = time.monotonic()
            # Each step seeds its own batch and dropout, so that a resumed run does what an unbroken one does.
            torch.manual_seed(recipe.seed * 1_000_003 + step)
            starts = torch.randint(len(tokens) - recipe.context, (recipe.batch,))
            window = tokens[starts[:, None] + offsets]  # [batch, context + 1]
            for group in optimizer.param_groups:
                group["lr"] = _learning_rate(step, recipe)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                logits, _ = model(window[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            state["step"], state["loss"] = step + 1, loss.item()
            state["seconds"] += time.monotonic() - began
            progress.update()
            progress.set_postfix(loss=f"{state['loss']:.3f}", refresh=False)
            _check_finite(state["loss"], state["step"], recipe)
    signal.raise_signal(interrupt.received)
    raise KeyboardInterrupt


def _check_finite(loss: float, step: int, recipe: Recipe) -> None:
    if not math.isfinite(loss):
        raise InputError(f"training diverged at step {step}; lower --learning-rate ({recipe.learning_rate})")


class _Interrupt:
    """Keeps SIGINT and SIGTERM until the step is whole: a state saved in the middle of one could not be continued
    exactly. Signals that are ignored, as by nohup, or that a handler outside of Python has are left alone."""

    received: int | None = None  # the signal that asks to end

    def __enter__(self) -> _Interrupt:
        before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)} if _in_main_thread() else {}
        self._before = {each: handler for each, handler in before.items() if handler not in (signal.SIG_IGN, None)}
        for each in self._before:
            signal.signal(each, self._request)
        return self

    def __exit__(self, *_) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def _request(self, received: int, _) -> None:
        self.received = received
        if received == signal.SIGINT:
            signal.signal(received, self._before[received])  # a second Ctrl-C stops at once


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))  # beyond, a float holds it no more


def _write_checkpoint(
    model,
    output: Path,
    recipe: Recipe,
    state: dict,
    tokenizer: Tokenizer,
    held,
    held_text: str,
    weights: str,
    identity: str,
) -> dict:
    dtype = {"fp16": torch.float16, "fp32": torch.float32}[weights]
    tensors = {name: model.state_dict()[name].to(dtype).contiguous() for name in model.weight_names()}
    model.load_state_dict(tensors, strict=False)  # measure what is stored, not what was trained
    loss = held_out_loss(model, held, recipe.context)
    if not math.isfinite(loss):
        raise InputError(f"the trained weights do not fit {weights}; lower --learning-rate or use --weights fp32")
    report = {
        "variant": model.config.variant,
        "parameters": model.config.parameters(),
        "held_out_perplexity": _perplexity(loss),
        "held_out_bits_per_byte": loss * len(held) / math.log(2) / len(held_text.encode()),
        "held_out_tokens": len(held),
        "trained_tokens": recipe.steps * recipe.batch * recipe.context,
        "minutes": state["seconds"] / 60,
        "recipe": asdict(recipe),
        "history": state["history"],
        "identity": _digest(identity),  # tells a run of the same options and data
        "extended_at": state["extended_at"],  # steps at which the schedule was made longer
    }
    (output / _WEIGHTS).unlink(missing_ok=True)  # of fewer steps: what follows is not theirs
    files.write_json(output / "config.json", model.config.to_dict())
    files.write_atomically(output / "tokenizer.json", tokenizer.to_str().encode())
    # For the exporters' parity reports; its beginning is enough for that.
    files.write_atomically(output / HELD_TEXT, held_text[:_HELD_CHARACTERS].encode())
    files.write_json(output / "training.json", report)
    files.write_atomically(output / _WEIGHTS, save(tensors))  # last: it makes the checkpoint whole
    return report


def _optimizer(model: Decoder, recipe: Recipe) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), foreach=True)


def _learning_rate(step: int, recipe: Recipe) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if step < recipe.warmup:
        return recipe.learning_rate * (step + 1) / recipe.warmup
    progress = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return recipe.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def _cpu_flags() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
