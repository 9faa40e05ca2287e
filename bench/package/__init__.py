"""One package, or several side by side: load, prefill, decode at depth, memory."""
