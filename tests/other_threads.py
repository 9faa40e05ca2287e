"""A session in the hands of several threads: every method but `cancel` and `close` refuses the second one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from edge_qkv import ContextFull, InputError, Sampling, Session

NOT_REFUSED = {"cancel", "close"}


def uses(session: Session, file: Path) -> dict[str, Callable[[], object]]:
    """Each public name of a session -> a use of it."""
    return {
        "dropped": lambda: session.dropped,
        "evaluate": lambda: session.evaluate([1, 2]),
        "fill": lambda: session.fill(90),
        "fork": lambda: session.fork().close(),
        "generate": lambda: list(session.generate("a", 2)),
        "generate_tokens": lambda: list(session.generate_tokens([1], 2)),
        "logits": session.logits,
        "memory": session.memory,
        "restore": lambda: session.restore(file),
        "reuse": lambda: session.reuse([1, 2, 3]),
        "rewind": lambda: session.rewind(3),
        "sample": session.sample,
        "save": lambda: session.save(file),
        "score": lambda: session.score([1, 2]),
        "set_sampling": lambda: session.set_sampling(Sampling()),
        "take_back": lambda: session.take_back(1),
        "tokens": lambda: session.tokens,
    }


def check_every_method(session: Session, file: Path, ids: list[int]) -> None:
    """While one thread is in `evaluate`, between two chunks of it, another one tries every method."""
    public = {name for name in vars(Session) if not name.startswith("_")}
    methods = uses(session, file)
    assert set(methods) | NOT_REFUSED == public
    if session.model.package.tokenizer_file is None:
        del methods["generate"]
    refused = set()

    def try_all() -> None:
        for name, use in methods.items():
            try:
                use()
            except InputError as error:
                assert "the session is in a call of another thread" in str(error)
                refused.add(name)

    def progress(done: int, total: int) -> None:
        other = threading.Thread(target=try_all)
        other.start()
        other.join()

    session.rewind(0)
    session.evaluate(ids, progress)
    assert refused == set(methods)
    assert session.tokens == session._engine.tokens().tolist() == ids
    given = session.generate_tokens([], 3)
    next(given)
    others = []
    free = threading.Thread(target=lambda: others.append(session.tokens))  # between two tokens
    free.start()
    free.join()
    assert others == [session.tokens]
    given.close()


def check_soundness(session: Session, file: Path, ids: list[int], rounds: int = 30) -> None:
    """Four threads use a session as they like; what they were let in for is done whole, and what it holds is known."""
    session.rewind(0)
    session.evaluate(ids[:20])
    session.save(file)
    methods = uses(session, file)
    counts, failures = {"done": 0, "refused": 0}, []

    def work(names: list[str]) -> None:
        for i in range(rounds * len(names)):
            try:
                methods[names[i % len(names)]]()
                counts["done"] += 1
            except (InputError, ContextFull):
                counts["refused"] += 1
            except BaseException as error:
                failures.append(error)

    names = sorted(set(methods) - {"generate"})
    threads = [threading.Thread(target=work, args=(names[i:] + names[:i],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and counts["done"], failures
    tokens = session.tokens
    assert tokens[: len(tokens) - len(session._pending)] == session._engine.tokens().tolist()
    session.rewind(min(5, len(tokens)))
    session.evaluate(ids[:30])
    assert session.tokens == session._engine.tokens().tolist() == tokens[:5] + ids[:30]
