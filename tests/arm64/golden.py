"""Prints what packages write after a prompt, greedily, one JSON line a package: `golden.py PROMPT TOKENS PACKAGE...`.

Runs on the host and, under emulation, on arm64.
"""

from __future__ import annotations

import json
import sys

from edge_qkv import Sampling, Session
from edge_qkv._native import library

prompt, count = sys.argv[1], int(sys.argv[2])
for package in sys.argv[3:]:
    with Session(package, context=256, threads=1) as session:
        tokenizer = session.model.package.tokenizer()
        tokens = list(session.generate_tokens(tokenizer.encode(prompt).ids, count, Sampling(temperature=0)))
        text = tokenizer.decode(tokens)
        print(json.dumps({"isa": library().eqkv_isa().decode(), "tokens": tokens, "text": text}), flush=True)
