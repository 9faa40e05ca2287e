"""Measurements to run on the device itself; nothing here is needed to use the package.

`edge-qkv bench` and `python -m edge_qkv.bench` are one; `COMMANDS` lists what they do besides measuring a package.
"""
