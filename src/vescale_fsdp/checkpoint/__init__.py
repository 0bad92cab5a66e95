"""Checkpoints that outlive the layout that wrote them: save and load with checks, safetensors, moves between engines.

torch.distributed.checkpoint works on our models as it is; this package adds what it leaves open.

Reading order: errors, manifest, files, contents, saving, loading, safetensor_file, hugging_face.
"""

from .errors import CheckpointError
from .hugging_face import export_safetensors, import_safetensors
from .loading import load
from .saving import save

__all__ = ["CheckpointError", "export_safetensors", "import_safetensors", "load", "save"]
