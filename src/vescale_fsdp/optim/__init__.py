"""Optimizers that need whole matrices, on parameters that are sharded in any way.

Reading order; a file imports only what stands before it:

    matrices orthogonalize owners holdings route notes passage terms lend aligned adamw blocks adamw8bit optimizer
    muon preconditioner panel_owners panel_state panels shampoo whole strip tiles flat
"""

from .adamw8bit import AdamW8bit
from .flat import flat
from .lend import Lender, Replicas, Run, lend
from .matrices import Matrix, matrices_of
from .muon import Muon
from .optimizer import Borrowed, MatrixOptimizer, matrix_groups
from .owners import Ownership, select_owners
from .panel_state import BlockViews, Kind
from .panels import PanelOptimizer
from .shampoo import Shampoo
from .whole import whole_matrices

__all__ = [
    "AdamW8bit",
    "BlockViews",
    "Borrowed",
    "Kind",
    "Lender",
    "Matrix",
    "MatrixOptimizer",
    "Muon",
    "Ownership",
    "PanelOptimizer",
    "Replicas",
    "Run",
    "Shampoo",
    "flat",
    "lend",
    "matrices_of",
    "matrix_groups",
    "select_owners",
    "whole_matrices",
]
