"""edge-qkv: language models whose keys and values are one tensor, with long contexts in little memory.

from edge_qkv import Session
for piece in Session("package").generate("To be, or"):
    print(piece, end="", flush=True)
"""

from edge_qkv.config import ModelConfig
from edge_qkv.errors import Cancelled, ContextFull, EdgeQKVError, InputError, OverBudget
from edge_qkv.loaded import Model
from edge_qkv.package import Package
from edge_qkv.packing import pack
from edge_qkv.planning import Plan, plan
from edge_qkv.sampling import Sampling
from edge_qkv.session import Session

__all__ = [
    "Cancelled",
    "ContextFull",
    "EdgeQKVError",
    "InputError",
    "Model",
    "ModelConfig",
    "OverBudget",
    "Package",
    "Plan",
    "Sampling",
    "Session",
    "pack",
    "plan",
]
__version__ = "0.1.0"
