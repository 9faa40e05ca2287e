"""`python -m edge_qkv` is `edge-qkv`."""

import sys

from edge_qkv.cli import main

sys.exit(main())
