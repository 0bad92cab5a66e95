"""Checkpoints that outlive the layout that wrote them: save and load with checks, safetensors, moves between engines.

torch.distributed.checkpoint works on our models as it is; this package adds what it leaves open.

Reading order: errors, manifest, files, contents, cover, save_planner, saving, loading, full_state, live, exchange,
migration, calls, change, safetensor_file, file_format, hugging_face.
"""

from .errors import CheckpointError
from .full_state import load_full_state
from .hugging_face import export_safetensors, import_safetensors
from .live import iterate_tensors, transfer_state
from .loading import check, load
from .migration import from_fsdp2, to_fsdp2
from .saving import save

__all__ = [
    "CheckpointError",
    "check",
    "export_safetensors",
    "from_fsdp2",
    "import_safetensors",
    "iterate_tensors",
    "load",
    "load_full_state",
    "save",
    "to_fsdp2",
    "transfer_state",
]
